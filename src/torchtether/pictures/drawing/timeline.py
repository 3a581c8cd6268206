"""Memory over time as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .svg import CHARACTER, document, element, words

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760.0, 300.0, 84.0, 46.0, 44.0, 40.0


def draw_timeline(
    seconds: Sequence[float],
    curves: Sequence[tuple[str, str, Sequence[float]]],
    title: str,
    describe: Callable[[float], str],
) -> str:
    """Return an SVG document with a step curve for each of ``curves``: (name, colour, amount at each of ``seconds``).

    ``describe`` formats an amount. Amounts may be negative; without any moments the frame is empty.
    """
    last = max(seconds, default=0.0) or 1.0
    amounts = [amount for _, _, series in curves for amount in series]
    low, high = min([0.0, *amounts]), max([0.0, *amounts])
    high = high if high > low else low + 1
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(moment: float) -> float:
        return _LEFT + (right - _LEFT) * moment / last

    def y(amount: float) -> float:
        return bottom - (bottom - _TOP) * (amount - low) / (high - low)

    made = [element("rect", width=_WIDTH, height=_HEIGHT, klass="page"), words(12, 20, title, "strong")]
    for quarter in range(5):
        amount = low + (high - low) * quarter / 4
        made.append(element("path", d=f"M{_LEFT} {y(amount):.2f}H{right}", klass="rule"))
        made.append(words(_LEFT - 8, y(amount) + 4, describe(amount), "faint", "end"))
        moment = last * quarter / 4
        made.append(words(x(moment), bottom + 18, f"{moment:.3g} s", "faint", "middle"))
    key = _LEFT
    for name, colour, series in curves:
        if series:
            points = [(x(moment), y(amount)) for moment, amount in zip(seconds, series, strict=True)]
            path = f"M{points[0][0]:.2f} {points[0][1]:.2f}" + "".join(f"H{a:.2f}V{b:.2f}" for a, b in points[1:])
            made.append(element("path", d=path, klass="curve", stroke=f"var(--{colour})"))
        label = f"{name}, at most {describe(max(series, default=0.0))}"
        made.append(element("rect", x=key, y=27.0, width=10, height=10, rx=2, klass=colour))
        made.append(words(key + 16, 36, label))
        key += 40 + CHARACTER * len(label)
    return document("".join(made), _WIDTH, _HEIGHT, title)
