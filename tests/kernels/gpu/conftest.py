"""GPU kernels: without a GPU, JAX interprets what Triton would compile."""

import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """Lets JAX interpret the kernels of Pallas, but on a GPU; nothing is kept of what it traces."""
    import jax

    from jspec.kernels.gpu import launch

    monkeypatch.setattr(launch, "_IS_INTERPRETED", jax.default_backend() != "gpu")
    jax.clear_caches()
    yield
    jax.clear_caches()
