"""Arithmetic: an expression is parsed, looked at node by node, and worked out under bounds; nothing is executed."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_drmas.workflows.toolbox.arguments import check_positive, refuse_unknown, text_argument
from verl_drmas.workflows.tools import Tool, ToolError

Number = int | float

# A chain such as 1+2+3 counts as one level, whatever its length.
NESTING = 40
DIGITS = 4000  # Python writes no longer integer, by its own limit against slow conversions

_NAMES = {"pi": math.pi, "e": math.e}
_CHARACTERS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
# By name: the function, and the fewest and most arguments it takes here.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "sqrt": (math.sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (round, 1, 2),
    "min": (min, 2, 100),
    "max": (max, 2, 100),
    "log": (math.log, 1, 2),
    "exp": (math.exp, 1, 1),
    "sin": (math.sin, 1, 1),
    "cos": (math.cos, 1, 1),
}
ALLOWED = f"numbers, + - * / // % **, parentheses, {', '.join([*_FUNCTIONS, *_NAMES])}"


@dataclass
class CalculatorSettings:
    """Bounds of the calculator. Together they also bound its time: a few milliseconds an expression.

    Attributes:
        characters: Longest expression.
        digits: Most digits of a whole number, on the way too.
    """

    characters: int = 500
    digits: int = 1000

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        check_positive(self, "characters", "digits")
        for name, most in (("characters", 2000), ("digits", DIGITS)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at most {most}")


class Calculator(Tool):
    """Works out one expression, by Python's rules: whole numbers are exact, `/` gives a decimal number."""

    Settings: ClassVar = CalculatorSettings

    def __init__(self, settings: CalculatorSettings | None = None, name: str = "calculator"):
        self.settings, self.name = settings or CalculatorSettings(), name
        self.description = f"Work out an arithmetic expression. It may hold {ALLOWED}."
        self.parameters = {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example (17 + 4) * 2 ** 10 / 3"}},
            "required": ["expression"],
        }
        self._counts = {"calls": 0.0, "errors": 0.0}

    async def call(self, arguments: dict[str, Any]) -> str:
        """The value of `expression`.

        Raises:
            ToolError: It is no arithmetic, or breaks a bound.
        """
        self._counts["calls"] += 1
        try:
            refuse_unknown(arguments, self.parameters["properties"])
            expression = text_argument(arguments, "expression", characters=self.settings.characters)
            return calculate(expression, digits=self.settings.digits)
        except ToolError:
            self._counts["errors"] += 1
            raise

    def check(self) -> str:
        return f"{self.name}: arithmetic in this process"

    def report(self) -> dict[str, float]:
        """Since the last report: calls and errors."""
        counts, self._counts = self._counts, {"calls": 0.0, "errors": 0.0}
        return counts


def calculate(expression: str, digits: int = 1000) -> str:
    """The value of an arithmetic expression, decimal numbers to 15 places.

    Args:
        expression: The expression.
        digits: Most digits of a whole number.

    Raises:
        ToolError: It is no arithmetic, or breaks a bound.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of what is refused below
            tree = ast.parse(expression.translate(_CHARACTERS).strip(), mode="eval")
    except SyntaxError as error:
        raise ToolError(f"the expression can't be read ({error.msg}); it may hold {ALLOWED}") from error
    except (RecursionError, MemoryError) as error:  # how the parser calls it, depending on where it meets its end
        raise ToolError("the expression is nested too deeply; work out its parts one by one") from error
    except ValueError as error:
        raise ToolError(f"the expression can't be read; it may hold {ALLOWED}") from error
    try:
        value = _value(tree.body, int(digits * math.log2(10)), NESTING)
    except ToolError:
        raise
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("a number is too large; use // to divide large whole numbers") from error
    except ValueError as error:
        raise ToolError(f"no real number is the result ({error})") from error
    if isinstance(value, int):
        return str(value)
    return format(value + 0.0, ".15g")  # adding 0.0 makes -0.0 a plain 0


def _value(node: ast.expr, bits: int, levels: int) -> Number:
    if levels == 0:
        raise ToolError(f"the expression is nested more than {NESTING} levels deep; work out its parts one by one")
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            found = value
        case ast.Name(id=name) if name in _NAMES:
            found = _NAMES[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
            found = _value(operand, bits, levels - 1)
            found = -found if isinstance(op, ast.USub) else found
        case ast.BinOp():
            chain = []
            while isinstance(node, ast.BinOp):
                chain.append((node.op, node.right))
                node = node.left
            found = _value(node, bits, levels - 1)
            for op, right in reversed(chain):
                found = _checked(_binary(op, found, _value(right, bits, levels - 1), bits), bits)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            found = _function(name, [_value(arg, bits, levels - 1) for arg in args])
        case _:
            raise ToolError(f"{_named(node)} isn't arithmetic; an expression may hold {ALLOWED}")
    return _checked(found, bits)


def _binary(op: ast.operator, left: Number, right: Number, bits: int) -> Any:
    if isinstance(op, ast.BitXor):
        raise ToolError("^ isn't known; write ** for a power")
    if type(op) not in _BINARY:
        raise ToolError(f"the operator {type(op).__name__} isn't arithmetic; an expression may hold {ALLOWED}")
    if isinstance(left, int) and isinstance(right, int):
        size = 0
        if isinstance(op, ast.Mult):
            size = left.bit_length() + right.bit_length() - 1
        elif isinstance(op, ast.Pow) and abs(left) > 1 and right > 0:
            size = (left.bit_length() - 1) * right  # fewer than the result has, so that nothing fitting is refused
        if size > bits:
            raise _too_large(bits)
    return _BINARY[type(op)](left, right)


def _function(name: str, arguments: list[Number]) -> Any:
    function, fewest, most = _FUNCTIONS[name]
    if not fewest <= len(arguments) <= most:
        needs = fewest if fewest == most else f"{fewest} to {most}"
        raise ToolError(f"{name} takes {needs} numbers, not {len(arguments)}")
    if name == "round" and len(arguments) == 2:
        places = arguments[1]
        if not isinstance(places, int) or abs(places) > DIGITS:
            raise ToolError(f"round takes a whole number of places up to {DIGITS}")
    return function(*arguments)


def _checked(value: Any, bits: int) -> Number:
    if isinstance(value, complex):
        raise ToolError("no real number is the result")
    if isinstance(value, int):
        if value.bit_length() > bits + 1:
            raise _too_large(bits)
    elif not math.isfinite(value):
        raise ToolError("a number is too large")
    return value


def _too_large(bits: int) -> ToolError:
    return ToolError(f"a whole number has more than about {round(bits / math.log2(10))} digits; it is too large")


def _named(node: ast.expr) -> str:
    """What a node is, for the agent that wrote it."""
    match node:
        case ast.Name(id=name):
            return f"the name {name!r}"
        case ast.Constant(value=value):
            return repr(value)[:40]
        case ast.Call(func=ast.Constant() | ast.BinOp() | ast.Call()):
            return "a number before a parenthesis (write * between them)"
        case ast.Call(keywords=[_, *_]):
            return "an argument with a name"
        case ast.Call(func=ast.Name(id=name)):
            return f"the function {name!r}"
        case ast.Tuple():
            return "a comma between numbers (write 1000, not 1,000)"
        case _:
            return type(node).__name__.lower()
