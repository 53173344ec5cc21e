"""What every test of training gets."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """Optax raises floats to whole powers, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield
