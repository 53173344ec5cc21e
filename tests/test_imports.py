"""What an import costs: nobody should wait for a library that is not used."""

import json
import subprocess
import sys

_MEASURE = """
import json, sys, time
import jax
begin = time.perf_counter()
import jspec
seconds = time.perf_counter() - begin
after_jspec = sorted(sys.modules)
import jspec.generate
print(json.dumps([seconds, after_jspec, sorted(sys.modules)]))
"""


def test_importing_jspec_is_almost_free_and_the_program_imports_what_it_needs():
    """Guards against a slow start: at most 0.3 s after JAX, heavy libraries only where used."""
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, check=True)
    seconds, after_jspec, after_program = json.loads(done.stdout)
    assert seconds <= 0.3
    heavy = {"transformers", "orbax", "torch", "matplotlib", "huggingface_hub", "gguf",
             "ml_collections"}  # fmt: skip
    assert not {"flax", "tokenizers", *heavy} & set(after_jspec)
    assert not heavy & set(after_program)
    assert "flax" in after_program  # the names are those that a module would have


def test_the_public_names_are_there():
    """Guards against a name in `__all__` whose home has moved."""
    import jspec

    for name in jspec.__all__:
        assert getattr(jspec, name).__module__.startswith("jspec.")
    assert not hasattr(jspec, "no_such_name")
