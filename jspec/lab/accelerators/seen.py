"""What JAX's profiler saw a device do, by kernels and copies."""

import collections
import pathlib

import jax

_LOOPS = "while", "call", "conditional"  # on a CPU events, too, and no kernels


def read_seen(folder: str) -> collections.Counter[str]:
    """Returns how often the first device was given each kernel or copy, by its name.

    `folder` is that of `jax.profiler.trace`. Of a CPU, XLA's operations are counted, which are
    events of the host, but for loops.
    """
    device, host = collections.Counter[str](), collections.Counter[str]()
    for path in sorted(pathlib.Path(folder).rglob("*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                if plane.name.startswith("/device:"):
                    # Other lines of a device show the same again, as steps and modules.
                    if plane.name.endswith(":0") and line.name.startswith(("Stream", "XLA Ops")):
                        device.update(event.name for event in line.events)
                    continue
                operations = (one for one in line.events if "hlo_op" in dict(one.stats))
                host.update(one.name for one in operations if not one.name.startswith(_LOOPS))
    return device or host
