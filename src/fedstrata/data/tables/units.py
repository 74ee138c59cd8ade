"""Units that are mixed up in practice, and the factors between them."""

from __future__ import annotations

import numpy as np

FACTORS = (
    (38.67, "cholesterol in mmol/L, to mg/dL"),
    (18.016, "glucose in mmol/L, to mg/dL"),
    (88.42, "creatinine in mg/dL, to µmol/L"),
    (17.1, "bilirubin in mg/dL, to µmol/L"),
    (2.8, "urea nitrogen in mmol/L, to mg/dL"),
    (7.5006, "kPa, to mmHg"),
    (2.2046, "kg, to pounds"),
    (2.54, "inches, to cm"),
    (12.0, "years, to months"),
    (365.25, "years, to days"),
    (60.0, "hours, to minutes"),
    (10.0, ""),
    (100.0, ""),
    (1000.0, ""),
    (1e6, ""),
)
"""Factors, and what they convert."""


def conversion(values: np.ndarray, low: float, high: float) -> str:
    """Return a sentence with the conversion that brings most values into a range; empty if none does, or many."""
    if not np.isfinite([low, high]).all():
        return ""
    tries = [((values - 32) / 1.8, "Fahrenheit to Celsius"), (values * 1.8 + 32, "Celsius to Fahrenheit")]
    for factor, what in FACTORS:
        there, back = what.split(", to ") if what else ("", "")
        tries.append((values * factor, f"times {factor:g}{f' ({what})' * bool(what)}"))
        tries.append((values / factor, f"divided by {factor:g}{f' (to {there})' * bool(back)}"))
    shares = [float(np.mean((low <= v) & (v <= high))) for v, _ in tries]
    best = max(shares)
    if best < 0.9:
        return ""
    names = [name for share, (_, name) in zip(shares, tries, strict=True) if share >= best - 0.05]
    if len(names) > 3:  # a wide range tells nothing
        return ""
    return f"Inside would be {100 * best:.0f} %: {', or '.join(names)}."
