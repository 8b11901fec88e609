"""A backend of one operation alone, on one kind of device, beside the library's own."""

import copy
from types import SimpleNamespace

import pytest
import torch

import regard
from regard import backends
from regard.backends.recurrent import reference
from regard.errors import BackendUnsupported


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    for table in ("_BACKENDS", "_ORDER"):
        monkeypatch.setattr(backends, table, copy.copy({k: dict(v) for k, v in getattr(backends, table).items()}))


def made(reason=None):
    return SimpleNamespace(reject=lambda call: reason, defer=lambda call: None, run=reference.run)


def inputs():
    return tuple(torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))


def test_a_recurrence_only_backend_is_asked_in_its_place(registry):
    q, k, v = inputs()
    wanted, _ = regard.recurrence(q, k, v, regard.Decay())
    backends.register("recurrence", "other", made(), devices=("cpu",))
    with backends.count_backends() as counts:
        out, _ = regard.recurrence(q, k, v, regard.Decay())
        regard.attention(q, k, v)
    assert counts["other"] == 1
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_other_operations_say_that_it_has_none(registry):
    q, k, v = inputs()
    backends.register("recurrence", "other", made(), devices=("cpu",))
    assert "other" in backends.names() and "other" not in backends.names("attention")
    with pytest.raises(BackendUnsupported, match="it has no attention"):
        regard.attention(q, k, v, backend="other")


def test_on_other_devices_it_runs_by_name_only(registry):
    q, k, v = inputs()
    backends.register("recurrence", "other", made(), devices=("cuda",))
    with backends.count_backends() as counts:
        regard.recurrence(q, k, v, regard.Decay())
        regard.recurrence(q, k, v, regard.Decay(), backend="other")
    assert counts["other"] == 1 and counts["chunked"] == 1


def test_its_reason_is_told(registry):
    q, k, v = inputs()
    backends.register("recurrence", "other", made("it is tired"), devices=("cpu",))
    with pytest.raises(BackendUnsupported, match="it is tired"):
        regard.recurrence(q, k, v, regard.Decay(), backend="other")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("softmax", "other"), "operation: expected one of attention"),
        (("recurrence", "chunked"), "name: expected one that recurrence has not yet, got 'chunked'"),
        (("recurrence", "other", ("cpu",), "sdpa"), "before: expected one of native"),
    ],
)
def test_what_cannot_be_registered(registry, arguments, words):
    operation, name, devices, before = (*arguments, ("cpu",), "chunked")[:4] if len(arguments) == 2 else arguments
    with pytest.raises(ValueError, match=words):
        backends.register(operation, name, made(), devices, before)
    assert name == "chunked" or name not in backends.names()


def test_once_on_a_device_without_an_order_of_its_own(registry):
    backends.register("recurrence", "other", made(), devices=("meta", "cpu"))
    orders = backends._ORDER["recurrence"]
    assert orders["meta"] == ("other", "chunked", "native", "reference")
    assert all(order.count("other") == 1 for order in orders.values())


def test_one_device_as_text(registry):
    q, k, v = inputs()
    backends.register("recurrence", "other", made(), devices="cpu")
    with backends.count_backends() as counts:
        regard.recurrence(q, k, v, regard.Decay())
    assert counts["other"] == 1 and set(backends._ORDER["recurrence"]) == {"cpu", ""}


@pytest.mark.parametrize(
    ("name", "backend", "devices", "kind", "words"),
    [
        (3, made(), ("cpu",), TypeError, "name: expected letters"),
        ("", made(), ("cpu",), ValueError, "name: expected letters"),
        ("two words", made(), ("cpu",), ValueError, "name: expected letters"),
        ("other", SimpleNamespace(run=reference.run), ("cpu",), TypeError, "got none named reject, defer"),
        ("other", SimpleNamespace(reject=1, defer=len, run=len), ("cpu",), TypeError, "got none named reject"),
        ("other", made(), (torch.device("cpu"),), TypeError, "devices: expected names"),
        ("other", made(), "", TypeError, "devices: expected names"),
    ],
)
def test_broken_backends_are_refused_and_nothing_changes(registry, name, backend, devices, kind, words):
    before = copy.deepcopy(backends._ORDER)
    with pytest.raises(kind, match=words):
        backends.register("recurrence", name, backend, devices)
    assert name not in backends.names() and before == backends._ORDER
