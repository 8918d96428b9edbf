"""One colour for each method: on the page in light and dark, and in pictures for papers.

The hue shows the clients' rule; the darker shade of a hue is the method with FedBE on top. FedAvg is grey. The contrast
with the background is at least 4.5 : 1. Some colours are alike in grey print, so lines have labels.
"""

LIGHT_DARK: dict[str, tuple[str, str]] = {
    "fedavg": ("#6b6f76", "#a3a8b0"),
    "fedbe": ("#0b4f9c", "#6fb1ff"),
    "v-distillation": ("#c04a00", "#ff9d5c"),
    "1-ensemble": ("#806000", "#d9b648"),
    "fedbe-sgd": ("#1f74c9", "#a6cfff"),
    "fedbe-tuned": ("#2d7a0f", "#8fd46a"),
    "fedbe-auto": ("#12307a", "#8ea6ff"),
    "fedavg-median": ("#5c5448", "#cfc4b2"),
    "fedbe-median": ("#2b5f8c", "#b9d9f0"),
    "fedprox": ("#0d8074", "#45c9b8"),
    "fedbe+fedprox": ("#05504a", "#8ee6da"),
    "fedavgm": ("#b03a86", "#f08cc8"),
    "fedbe+fedavgm": ("#70124f", "#ffbfe4"),
    "scaffold": ("#7557c9", "#b49cf5"),
    "fedbe+scaffold": ("#412490", "#d6c8ff"),
    "fedavg-bn": ("#3f4854", "#c9ced6"),
    "fedadam": ("#a3325a", "#f593b4"),
    "fedyogi": ("#8a1f2d", "#ff9fa8"),
    "past-averages": ("#0a6d8c", "#7fd0ea"),
    "feddf": ("#9a4f1c", "#f2b48a"),
    "feddyn": ("#54602c", "#bccb80"),
}
OTHER = ("#444444", "#cccccc")
# From low to high accuracy; the lightness shows the order too.
RAMP = ("#f3c969", "#e58a4e", "#b4456a", "#5b2a86", "#1b1447")
DARK_RAMP = ("#3d2a78", "#7a3b8f", "#c2557f", "#f0915a", "#fbe08a")


def light(method: str) -> str:
    """The colour of a method on white."""
    return LIGHT_DARK.get(method, OTHER)[0]


def css() -> str:
    """The colours as CSS variables: --m-fedbe …, --ramp-0 …"""
    methods = {f"m-{variable(name)}": pair for name, pair in {**LIGHT_DARK, "other": OTHER}.items()}
    ramp = {f"ramp-{i}": pair for i, pair in enumerate(zip(RAMP, DARK_RAMP, strict=True))}
    return "".join(f"--{name}:light-dark({a},{b});" for name, (a, b) in {**methods, **ramp}.items())


def variable(method: str) -> str:
    """A method's name as a part of a CSS variable; "other" for a method without a colour.

    >>> variable("fedbe+scaffold"), variable("mine</style>")
    ('fedbe-and-scaffold', 'other')
    """
    return method.replace("+", "-and-") if method in LIGHT_DARK else "other"
