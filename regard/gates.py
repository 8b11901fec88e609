"""The former name of `regard.decays`."""

from regard.decays import *  # noqa: F403
