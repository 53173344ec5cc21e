"""Numbers of things in words."""


def counted(number: int, unit: str) -> str:
    """Returns how many there are: "1 cell", "2 cells"."""
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
