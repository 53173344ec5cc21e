"""Rules with their options, as tests call them."""

import dataclasses

from jspec.generation.options import rules_that_read
from jspec.speculation.acceptance import RULES, RuleOptions, get_rule


def rule_cases(is_wanted):
    """Returns the rules that are wanted, by name: at the defaults, and for each option that a rule
    reads, at the lowest and the highest value, as "NAME, OPTION=VALUE".
    """
    cases = {name: get_rule(name) for name in RULES}
    for field in dataclasses.fields(RuleOptions):
        for value in field.metadata["between"]:
            for name in set(rules_that_read(field.name)) & RULES.keys():
                options = RuleOptions(**{field.name: value})
                cases[f"{name}, {field.name}={value:g}"] = get_rule(name, options)
    return {name: rule for name, rule in sorted(cases.items()) if is_wanted(rule)}
