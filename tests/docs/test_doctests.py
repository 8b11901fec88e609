"""Every `>>>` example in the package runs and says what it prints."""

import doctest
import importlib
import pkgutil

import pytest

import regard

MODULES = ["regard", *(item.name for item in pkgutil.walk_packages(regard.__path__, "regard."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
