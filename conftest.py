"""Settings of the project's own tests: a slow or busy machine is no finding of theirs; some run at night only."""

import gc

import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # until all is collected, which makes a million objects that stay
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--nightly`."""
    parser.addoption("--nightly", action="store_true", help="also run the tests that are marked nightly; minutes more")


def pytest_collection_finish() -> None:
    """Keep the collector from walking through torch and five thousand tests whenever a test collects."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked nightly to the nightly job, and have pytest count them as deselected."""
    if config.getoption("--nightly"):
        return
    left = [item for item in items if item.get_closest_marker("nightly")]
    if left:
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
