"""What an audit of each acceptance rule consists of, as a table."""

from jspec.common.text_table import NOTHING, format_table
from jspec.lab.auditing.controls import CALL_CONTROLS, tree_controls
from jspec.speculation.acceptance import RULES, RuleOptions
from jspec.speculation.types import AcceptanceRule, Temperatures

_COLUMNS = "rule", "temperature", "lossless", "negative control", "and on trees"


def list_rules() -> str:
    """Returns a table of all rules, yours too, and the controls that an audit must reject."""
    lines = [_line(name, make(RuleOptions())) for name, make in RULES.items()]
    whatever = f"on trees, whatever the rule, above temperature 0: {', '.join(CALL_CONTROLS)}"
    return f"{format_table(_COLUMNS, lines)}\n{whatever}"


def _line(name: str, rule: AcceptanceRule) -> tuple[str, ...]:
    on_trees = [name for name in tree_controls(rule, None, 0) if name not in CALL_CONTROLS]
    controls = ["a flatter target", ", ".join(on_trees) or NOTHING]
    if rule.temperatures is Temperatures.ZERO:  # the text says everything
        controls = [NOTHING, NOTHING]
    is_lossless = "yes" if rule.is_lossless else "no"
    return name, rule.temperatures.value, is_lossless, *controls
