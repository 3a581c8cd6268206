"""Every deliberate exception: one line, picklable, and also a builtin type.

    TetherError
    ├── ArgumentError      (TypeError)             an argument is of a kind that the function does not take
    ├── UnsupportedOpError (RuntimeError)          an op that a Weight has no rule for
    ├── SchemeError        (ValueError)            a scheme cannot be built, does not fit, or met bad values
    ├── RuleError          (ValueError)            rules that match nothing, make no sense, or contradict each other
    ├── TieError           (ValueError)            ties that are broken, disagree, or cannot be made
    ├── ConversionError    (RuntimeError)          something holds a parameter so that it cannot be exchanged
    ├── OptimizerError     (ValueError)            an optimizer and a model that do not belong together
    ├── LoadError          (RuntimeError)          a checkpoint and a model that do not fit
    ├── CheckpointError    (ValueError)            a file that cannot be read or written
    └── LawError           (AssertionError)        a class, scheme or format breaks laws of tt.testing

    TrainingWarning        (UserWarning)           a Weight whose scheme loses small updates; warned once

The text is ``name: what is wrong, with both values. What to do.`` on one line, because torch prints errors that
are raised inside ``load_state_dict`` through ``repr``.
"""

from __future__ import annotations


class TetherError(Exception):
    """Report what is wrong, where, and what to do: the base of every error that torchtether raises on purpose.

    >>> SchemeError("got 3 bits", name="head.weight", fix="Use 4.")
    SchemeError('head.weight: got 3 bits. Use 4.')
    """

    what: str
    """What is wrong, with both values."""
    name: str
    """The tensor, argument or file that it is about; may be empty."""
    fix: str
    """What to do; may be empty."""

    def __init__(self, what: str, *, name: str = "", fix: str = "") -> None:
        self.what, self.name, self.fix = what, name, fix
        text = f"{name}: {what}" if name else what
        if fix:
            text = f"{text.rstrip('.')}. {fix}"
        line = " ".join(text.split())
        super().__init__(line.encode(errors="backslashreplace").decode())  # a name from JSON may hold a lone surrogate

    def named(self, name: str) -> TetherError:
        """Return the same error about ``name``; an error that has a name keeps it."""
        return self if self.name else type(self)(self.what, name=name, fix=self.fix)


class ArgumentError(TetherError, TypeError):
    """Report an argument of a kind that the function does not take; nothing has happened."""


class UnsupportedOpError(TetherError, RuntimeError):
    """Report an op, or arguments of one, that a Weight has no rule for.

    It is no NotImplementedError: libraries take that one for a method that nobody has written, and go on without it.
    ``torch.nn.utils.parametrize`` would skip a ``right_inverse``, and the weight would have other values.
    """


class SchemeError(TetherError, ValueError):
    """Report a scheme that cannot be built, does not fit a shape, or met values that it cannot hold."""


class RuleError(TetherError, ValueError):
    """Report rules that match nothing, name no known scheme, are no regex, or contradict each other."""


class TieError(TetherError, ValueError):
    """Report ties that are broken, disagree with their record, or cannot be made."""


class ConversionError(TetherError, RuntimeError):
    """Report a parameter that cannot be exchanged now, because something holds it or depends on it."""


class OptimizerError(TetherError, ValueError):
    """Report an optimizer with parameters that the model does not have, or the reverse."""


class LoadError(TetherError, RuntimeError):
    """Report a checkpoint that does not fit the model; the text lists the first faults, ``faults`` has all of them."""

    faults: tuple[str, ...] = ()
    """What does not fit, one line each; empty where the error is about something else."""


class CheckpointError(TetherError, ValueError):
    """Report a file that cannot be read or written, or contradicts its own header or index."""


class LawError(TetherError, AssertionError):
    """Report a tensor subclass, scheme or format that breaks laws of ``tt.testing``, or a law that does not exist."""


class TrainingWarning(UserWarning):
    """Report a Weight whose scheme rounds updates to the nearest, so that small ones have no effect.

    It is one that is trained, or state that an optimizer made by ``torch.empty_like``, ``new_empty`` or ``new_zeros``.

    >>> issubclass(TrainingWarning, UserWarning)
    True
    """
