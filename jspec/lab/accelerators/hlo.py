"""A compiled program, read from the text of XLA's optimised HLO."""

import functools
import math
import re
from typing import NamedTuple

_ARRAY = re.compile(r"\b([a-z]\w*)\[([0-9,]*)\](\{[^}]*\})?")  # dtype, sizes, layout
ON_CHIP = "S(1)"  # in a layout
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
# ROOT, name, shape, op, operands and attributes.
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(([^)]*)\)?(.*)$"
)
_TABLES = "FileNames", "FunctionNames", "FileLocations", "StackFrames"
_WRAPPERS = " linear", " look_up", " operation"  # their callers tell what they are part of


def array_sizes(shape: str, *, on_chip: float = 0.0) -> list[float]:
    """Returns the bytes of each array in a shape's text, times `on_chip` on a TPU's chip."""
    sizes = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        bits = re.search(r"\d+", dtype)
        width = int(bits[0]) / 8 if bits else dtype == "pred"
        width *= on_chip if ON_CHIP in layout else 1
        sizes.append(width * math.prod(map(int, filter(None, dims.split(",")))))
    return sizes


def array_bytes(shape: str) -> float:
    """Returns their sum."""
    return sum(array_sizes(shape))


class Instruction(NamedTuple):
    """One line of HLO."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def find(self, pattern: str) -> str:
        """Returns what a pattern's group matches in the attributes; an empty text for nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def called(self, key: str) -> str:
        """Returns the name of the computation that an attribute names."""
        return self.find(rf"\b{key}=%?([\w.\-]+)")

    def branches(self) -> list[str]:
        """Returns a conditional's computations, that for false (or 0) first."""
        names = re.findall(r"[\w.\-]+", self.find(r"branch_computations=\{([^}]*)\}"))
        return names or [self.called("false_computation"), self.called("true_computation")]


Computation = dict[str, Instruction]  # by name, in the order in which they run


class Module:
    """A program: its computations by name, and the name of the first one, `entry`."""

    def __init__(self, text: str) -> None:
        """Reads what `compiled.as_text()` returns."""
        self.computations: dict[str, Computation] = {}
        self.entry, current = "", Computation()
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif body := _INSTRUCTION.match(line):
                root, name, shape, op, operands, attributes = body.groups()
                names = tuple(re.findall(r"%([\w.\-]+)", operands))
                current[name] = Instruction(name, shape, op, names, attributes, bool(root))
        self._tables = {name: _read_table(text, name) for name in _TABLES}

    def place(self, own: Instruction) -> str:
        """Returns the line that made it, `file:line function`, or "?": the innermost one that says
        which part of the model or of the algorithm it is.
        """
        inner = self.computations.get(own.called("calls"), {})
        for one in (own, *reversed(inner.values())):
            if rows := self._lines(int(one.find(r"stack_frame_id=(\d+)") or 0)):
                telling = [row for row in rows if not row.startswith("kernels/")]
                telling = [row for row in telling if not row.endswith(_WRAPPERS)]
                return (telling or rows)[0]
        return "?"

    @functools.cache  # noqa: B019  (it lives no longer than the module is read)
    def _lines(self, frame: int) -> tuple[str, ...]:
        """Returns the lines of jspec that led to a frame, innermost first."""
        if frame == 0:
            return ()
        row = self._tables["StackFrames"][frame]
        place = self._tables["FileLocations"][_number("file_location", row)]
        file = self._tables["FileNames"][_number("file_name", place)]
        function = self._tables["FunctionNames"][_number("function_name", place)]
        path = file.strip('"').rpartition("/jspec/")[2]
        name = function.strip('"').rpartition(".")[2]
        own = (f"{path}:{_number('line', place)} {name}",) if "/jspec/" in file else ()
        return own + self._lines(_number("parent_frame", row) - 1)  # 1: there is none


def _number(key: str, text: str) -> int:
    found = re.search(rf"\b{key}(?:_id)?=(\d+)", text)
    return int(found[1]) if found else 1


def _read_table(text: str, name: str) -> dict[int, str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = (row.split(" ", 1) for row in (found[1] if found else "").splitlines())
    return {int(index): content for index, content in rows}
