"""Check the arguments of functions that users call, before the functions run."""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import linecache
import reprlib
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from . import InputError

Function = TypeVar("Function", bound=Callable)  # a function or class
TypeAnnotation = Any  # int, str | None, Annotated[...], and so on


def int_at_least(
    low: int,  # the smallest number allowed
    # says in error messages which numbers are allowed; empty: "a whole number from `low`"
    description: str = "",
) -> TypeAnnotation:
    """Return a type annotation for whole numbers of at least `low`."""
    from pydantic import Field

    return Annotated[int, Field(ge=low), description or f"a whole number from {low}"]


def float_between(
    above: float | None = None,  # numbers must be greater than this; None: no such limit
    low: float | None = None,  # numbers must be at least this; None: no such limit
    high: float | None = None,  # numbers must be at most this; None: no such limit
) -> TypeAnnotation:
    """Return a type annotation for finite numbers within the given limits."""
    from pydantic import Field

    all_limits = {"gt": above, "ge": low, "le": high}
    phrases = {"gt": "above", "ge": "of at least", "le": "of at most"}
    limits = {name: limit for name, limit in all_limits.items() if limit is not None}
    limits_text = " and ".join(f"{phrases[name]} {limit:g}" for name, limit in limits.items())
    return Annotated[float, Field(**limits), f"a finite number {limits_text}".strip()]


def text_list(
    min_count: int = 0,  # smallest length of the list, 0 or 1
) -> TypeAnnotation:
    """Return a type annotation for lists of at least `min_count` strings, none of which is empty."""
    from pydantic import Field

    description = "a list of texts that are not empty"
    if min_count:
        description += ", at least one"
    return Annotated[
        Sequence[Annotated[str, Field(min_length=1)]],
        Field(min_length=min_count),
        description,
    ]


def values_where(
    base_type: TypeAnnotation,  # type of the values
    description: str,  # says in error messages which values are allowed
    condition: Callable[[Any], bool],  # returns True if a value is allowed
) -> TypeAnnotation:
    """Return a type annotation for those values of a type for which a condition is true."""
    from pydantic import AfterValidator

    def check(value):
        """Return the value; raise ValueError if the condition is false for it."""
        if not condition(value):
            raise ValueError(description)
        return value

    return Annotated[base_type, AfterValidator(check), description]


def nonempty_text() -> TypeAnnotation:
    """Return a type annotation for strings with at least one character that is not white space."""
    return values_where(str, "a text that is not empty", lambda value: bool(value.strip()))


def path_argument() -> TypeAnnotation:
    """Return a type annotation for one path, given as a string that is not empty or as a Path."""
    return values_where(
        str | Path, "a path that is not empty", lambda value: bool(str(value).strip())
    )


def path_list() -> TypeAnnotation:
    """Return a type annotation for lists of at least one path."""
    return values_where(
        Sequence[str | Path],
        "a list of paths, at least one",
        lambda value: len(value) and all(map(str, value)),
    )


def _describe_type(allowed: TypeAnnotation) -> str:
    """Describe in words which values a type annotation allows, for error messages."""
    origin = typing.get_origin(allowed)
    parts = typing.get_args(allowed)
    if origin is Annotated:
        description = next((part for part in parts[1:] if isinstance(part, str)), "")
        return description or _describe_type(parts[0])
    if origin in (Union, types.UnionType):
        choices = list(dict.fromkeys(_describe_type(part) for part in parts))
        if len(choices) == 1:
            return choices[0]
        return ", ".join(choices[:-1]) + f" or {choices[-1]}"
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if origin is tuple:
        if not parts or Ellipsis in parts:
            return "a tuple"
        return f"a tuple of {' and '.join(map(_describe_type, parts))}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        elements = {str: " of texts", int: " of whole numbers", float: " of finite numbers"}
        if parts[0] in elements:
            return "a list" + elements[parts[0]]
        if typing.get_origin(parts[0]) in (Annotated, tuple):
            return f"a list in which each entry is {_describe_type(parts[0])}"
        return "a list"
    if origin is not None or allowed is Callable:
        return "a function"
    descriptions = {
        int: "a whole number",
        float: "a finite number",
        bool: "True or False",
        str: "a text",
        Path: "a path",
        type(None): "None",
        None: "None",
        Any: "anything",
        Mapping: "a mapping",
        Sequence: "a list",
    }
    if isinstance(allowed, typing.Hashable) and allowed in descriptions:
        return descriptions[allowed]
    return f"a {getattr(allowed, '__name__', allowed)}"


def _describe_value(value: Any) -> str:
    """Describe a value in one line, for error messages: a tensor by its shape and dtype, other values by at most 80 characters."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


class _Unused:
    """A class that has no instances: the union of an annotation with it allows the same values as the annotation."""


def _accept_instances(allowed: TypeAnnotation) -> TypeAnnotation:
    """Return the annotation, changed so that instances of its pydantic models and dataclasses are not checked field by field."""
    from pydantic import BaseModel, InstanceOf

    if isinstance(allowed, type) and (
        issubclass(allowed, BaseModel) or dataclasses.is_dataclass(allowed)
    ):
        return InstanceOf[allowed]
    if typing.get_origin(allowed) in (Union, types.UnionType):
        return Union[tuple(_accept_instances(part) for part in typing.get_args(allowed))]  # noqa: UP007
    return allowed


class _ArgumentCheck(NamedTuple):
    """The check of one argument."""

    validate: Callable[[Any], Any]  # raises pydantic's ValidationError if a value is not allowed
    allowed: TypeAnnotation  # type annotation that describes the allowed values


def _make_argument_checks(
    function: Callable,  # the function whose arguments are checked
    explicit_types: Mapping[
        str, TypeAnnotation
    ],  # parameter -> annotation to use instead of its own
) -> dict[str, _ArgumentCheck]:  # keyed by parameter; without *args and **kwargs
    """Make a check for each parameter of a function from its type annotation."""
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(arbitrary_types_allowed=True, strict=True, allow_inf_nan=False)
    annotations = typing.get_type_hints(function, include_extras=True)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in variadic
    ]
    checks = {}
    for name in dict.fromkeys([*names, *explicit_types]):
        allowed = explicit_types[name] if name in explicit_types else annotations.get(name, Any)
        if inspect.isfunction(allowed):  # it returns the annotation, and imports what that needs
            allowed = allowed()
        # pydantic accepts a configuration for a union, but not for every single class.
        schema = _accept_instances(allowed) | _Unused
        validate = TypeAdapter(schema, config=config).validator.validate_python
        checks[name] = _ArgumentCheck(validate, allowed)
    return checks


def _find_signature_error(
    function: Callable,  # the function that is called
    name: str,  # name of the function, for the error message
    args: tuple,  # positional arguments of the call
    kwargs: dict,  # keyword arguments of the call
) -> InputError | None:  # None: the call fits the signature
    """Return an error if the arguments of a call do not fit the function's signature.

    An example is "`stpes` is not an argument of sample; did you mean `steps`?".
    """
    signature = inspect.signature(function)
    positional_only = {
        key
        for key, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    }
    keywords = {key: value for key, value in kwargs.items() if key not in positional_only}
    try:
        signature.bind(*args, **keywords)
        return None
    except TypeError as error:
        reason = str(error)
    names = [key for key in signature.parameters if key not in ("self", "cls")]
    has_variadic_keywords = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in signature.parameters.values()
    )
    for key in kwargs:
        if key not in names and not has_variadic_keywords:
            similar = difflib.get_close_matches(key, names, 1, 0.5)
            if similar:
                hint = f"did you mean `{similar[0]}`?"
            else:
                hint = f"it takes {', '.join(names) or 'none'}"
            return InputError(f"`{key}` is not an argument of {name}; {hint}")
    return InputError(f"{name} takes {', '.join(names) or 'no argument'}; {reason}")


def _comments_by_line(
    source: str,  # Python code
) -> tuple[dict[int, str], set[int]]:  # line number -> comment; lines with only a comment
    """Return the comments in Python code by line number, and the numbers of the lines that hold only a comment."""
    comments = {}
    comment_lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            comments[row] = token.string.lstrip("# ")
            if not token.line[:column].strip():
                comment_lines.add(row)
    return comments, comment_lines


def _read_signature_source(function: Callable) -> str:
    """Return the source of a function's signature with the body `pass`; raise OSError if the source cannot be read.

    Reading the signature alone takes a twentieth of the time that `inspect.getsource` takes.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), None)
    if start is None:
        raise OSError("no source")
    indent = lines[start][: -len(lines[start].lstrip())]
    signature = []
    for line in lines[start:]:
        signature.append(line)
        code_part = line.partition("  #")[0].rstrip()
        is_last = line.startswith((f"{indent}def ", f"{indent})")) and code_part.endswith(":")
        if is_last:
            return textwrap.dedent("".join(signature)) + "    pass\n"
    raise OSError("the signature has no end")


def describe_parameters(function: Callable) -> str:
    """Format the comments in a function's signature as the sections "Args" and "Returns" of a docstring.

    A parameter's comment is on its own line or on the lines above it. Returns an empty string if the source cannot be
    read.
    """
    try:
        source = _read_signature_source(function)
        (definition,) = ast.parse(source).body
        comments, comment_lines = _comments_by_line(source)
    except (OSError, SyntaxError, ValueError, tokenize.TokenError):
        return ""
    if not isinstance(definition, ast.FunctionDef):
        return ""
    arguments = definition.args
    lines = []
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        text = comments.get(argument.lineno, "")
        row = argument.lineno - 1
        above: list[str] = []
        while not text and row in comment_lines:
            above.insert(0, comments[row])
            row -= 1
        text = (text or " ".join(above)).removeprefix(f"{argument.arg}: ")
        if text:
            lines.append(f"    {argument.arg}: {text}")
    section = "\n".join(["Args:", *lines]) if lines else ""
    # A comment on the line of a parameter describes the parameter, not the result.
    result = ""
    if definition.returns and definition.returns.end_lineno not in {
        argument.lineno for argument in arguments.args
    }:
        result = comments.get(definition.returns.end_lineno, "")
    if result:
        section += f"\n\nReturns:\n    {result}" if section else f"Returns:\n    {result}"
    return section


def check_arguments(
    # each maps the arguments, keyed by parameter, to an error sentence if they contradict each other, else to None
    *rules: Callable[[Mapping[str, Any]], str | None],
    # parameter -> annotation to use instead of its own, or a function that returns the annotation
    **explicit_types: TypeAnnotation,
) -> Callable[[Function], Function]:
    """Return a decorator that checks the arguments of every call against the function's type annotations.

    A wrong argument raises InputError, which names the argument, its value and what is allowed. Types are not
    converted: 1.0 and True are not whole numbers, and a string is not a list of strings. A check takes a few
    microseconds, so decorate functions that users call, but nothing that runs in every forward pass. If a class is
    decorated, the arguments of its constructor are checked.
    """

    def decorate(function):
        """Return the function with a check of its arguments, or the class with a check of its constructor's arguments."""
        if isinstance(function, type):
            function.__init__ = check_arguments(*rules, **explicit_types)(function.__init__)
            return function
        name = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters
        positional_only = {
            key
            for key, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        }
        names = [
            key
            for key, parameter in parameters.items()
            if key in positional_only or parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        required = [key for key in names if parameters[key].default is inspect.Parameter.empty]
        checks: dict[str, _ArgumentCheck] = {}  # made by the first call

        def find_error(args: tuple, kwargs: dict) -> InputError | None:
            """Return the error for the first wrong argument of a call; None if all arguments are allowed."""
            if not checks:
                checks.update(_make_argument_checks(function, explicit_types))
            all_kwargs = kwargs
            if positional_only:  # a keyword of such a name belongs to the function's own **kwargs
                kwargs = {key: value for key, value in kwargs.items() if key not in positional_only}
            # Binding the signature is slow, so bind it only if this faster test suspects an error.
            if (
                len(args) > len(names)
                or len(args) + len(kwargs) < len(required)
                or not kwargs.keys() <= checks.keys()
                or required[len(args) :]
                and not kwargs.keys() >= {*required[len(args) :]}
                or not kwargs.keys().isdisjoint(names[: len(args)])
            ):
                error = _find_signature_error(function, name, args, all_kwargs)
                if error:
                    return error
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for key, value in arguments.items():
                if key not in checks:  # it belongs to the function's own **kwargs
                    continue
                try:
                    checks[key].validate(value)
                except Exception:  # ValidationError, or anything that a strange object raises
                    return InputError(
                        f"`{key}` of {name} must be {_describe_type(checks[key].allowed)}; "
                        f"got {_describe_value(value)}"
                    )
            for rule in rules:
                message = rule(arguments)
                if message:
                    return InputError(message)
            return None

        @functools.wraps(function)
        def with_check(*args, **kwargs):
            error = find_error(args, kwargs)
            if error:
                raise error
            return function(*args, **kwargs)

        section = describe_parameters(function)
        if section:
            with_check.__doc__ = f"{inspect.getdoc(function) or ''}\n\n{section}\n"
        return with_check

    return decorate
