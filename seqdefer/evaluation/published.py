"""The figures that the paper prints: AUDC, its std, % improvement over Random, its std.

Its one row Optimal stands under OptimalFree: 0 on TSP is the expert's loss at every budget, which no policy reaches.
"""

from __future__ import annotations

from seqdefer.evaluation.results import PaperFigure

_WEATHER = {
    "Random": (555.33, 174.75, 0.0, 0.0),
    "OptimalFree": (36.66, 4.34, 93.01, 1.47),
    "ChowMean": (521.75, 151.71, 5.26, 9.92),
    "ChowSum": (521.75, 151.71, 5.26, 9.92),
    "ChowQuantile0.0": (528.02, 151.50, 3.91, 9.25),
    "ChowQuantile0.4": (528.02, 151.50, 3.91, 9.25),
    "ChowQuantile0.8": (528.02, 151.50, 3.91, 9.25),
    "ChowQuantile1.0": (528.02, 151.50, 3.91, 9.25),
    "WholeModelEmbed": (576.24, 160.28, -5.28, 15.09),
    "OneTimeModel": (508.82, 143.39, 7.23, 11.80),
    "OneTimeScore": (521.64, 134.83, 4.46, 10.14),
    "TokenwiseModel": (412.45, 131.43, 25.78, 1.33),
    "TokenwiseScore": (707.51, 203.38, -28.50, 6.20),
}

_TSP = {
    "Random": (306.12, 6.31, 0.0, 0.0),
    "OptimalFree": (0.0, 0.0, 100.0, 0.0),
    "ChowMean": (287.01, 7.73, 6.23, 2.14),
    "ChowSum": (287.01, 7.73, 6.23, 2.14),
    "ChowQuantile0.0": (301.18, 9.40, 1.63, 1.18),
    "ChowQuantile0.4": (287.74, 5.91, 6.00, 1.16),
    "ChowQuantile0.8": (288.86, 9.35, 5.65, 2.12),
    "ChowQuantile1.0": (295.71, 6.12, 3.39, 1.42),
    "WholeModelEmbed": (307.88, 8.73, -0.58, 2.02),
    "OneTimeModel": (270.92, 10.67, 11.52, 2.41),
    "OneTimeScore": (319.79, 14.53, -4.44, 3.63),
    "OneTimeEntropy": (324.23, 13.48, -5.93, 4.15),
}

_XSUM = {
    "Random": (1433.55, 36.98, 0.0, 0.0),
    "OptimalFree": (1212.00, 46.85, 15.48, 1.50),
    "ChowMean": (1430.52, 19.09, 0.13, 3.48),
    "ChowSum": (1431.41, 19.65, 0.06, 3.50),
    "ChowQuantile0.0": (1432.28, 25.89, -0.01, 3.89),
    "ChowQuantile0.4": (1436.10, 24.23, -0.27, 3.80),
    "ChowQuantile0.8": (1434.48, 19.32, -0.15, 3.40),
    "ChowQuantile1.0": (1427.27, 18.91, 0.35, 3.50),
    "WholeModelEmbed": (1434.23, 21.57, -0.11, 3.81),
    "OneTimeModel": (1398.39, 22.84, 2.35, 4.03),
    "OneTimeScore": (1433.41, 26.82, -1.50, 2.13),
    "OneTimeEntropy": (1442.92, 24.92, -1.75, 2.38),
    "TokenwiseModel": (1323.92, 25.34, 7.63, 0.93),
    "TokenwiseScore": (1354.78, 31.87, 5.48, 0.97),
    "TokenwiseEntropy": (1360.41, 31.50, 5.09, 0.63),
}

PAPER: dict[str, dict[str, PaperFigure]] = {
    "tsp": {name: PaperFigure(*figures) for name, figures in _TSP.items()},
    "xsum": {name: PaperFigure(*figures) for name, figures in _XSUM.items()},
    "weather": {name: PaperFigure(*figures) for name, figures in _WEATHER.items()},
}

# One-time deferral by task, method and number of hand-offs |J|.
_HAND_OFFS: dict[str, dict[str, dict[int, tuple[float, float, float, float]]]] = {
    "tsp": {
        "OneTimeModel": {
            5: (287.37, 7.67, 6.13, 1.68), 10: (277.44, 10.59, 9.38, 2.54), 15: (277.62, 9.15, 9.32, 1.85),
            20: (273.34, 11.13, 10.74, 2.34), 25: (273.31, 12.20, 10.73, 3.11), 30: (271.10, 9.77, 11.45, 2.16),
            35: (273.30, 6.76, 10.72, 1.69), 40: (272.57, 10.08, 10.97, 2.53), 45: (270.92, 10.67, 11.52, 2.41),
            51: (272.64, 9.11, 10.95, 2.06),
        },
        "OneTimeScore": {
            5: (322.08, 18.24, -5.19, 4.99), 10: (318.00, 12.62, -3.86, 2.95), 15: (320.45, 6.89, -4.68, 1.32),
            20: (321.35, 19.06, -4.96, 5.43), 25: (318.49, 12.65, -4.03, 3.18), 30: (319.61, 10.82, -4.39, 1.99),
            35: (316.40, 15.66, -3.36, 4.55), 40: (318.99, 14.07, -4.18, 3.49), 45: (318.52, 14.10, -4.04, 3.71),
            51: (318.96, 14.78, -4.17, 3.66),
        },
        "OneTimeEntropy": {
            5: (316.76, 19.90, -3.43, 5.30), 10: (317.84, 22.77, -3.78, 6.42), 15: (317.87, 12.57, -3.83, 3.22),
            20: (320.54, 22.24, -4.70, 6.68), 25: (321.32, 13.95, -4.97, 4.10), 30: (321.67, 14.16, -5.05, 3.11),
            35: (320.51, 20.33, -4.70, 6.20), 40: (320.91, 15.41, -4.82, 4.16), 45: (322.02, 14.99, -5.19, 4.31),
            51: (322.91, 14.05, -5.50, 4.39),
        },
    },
    "xsum": {
        "OneTimeModel": {
            3: (1412.16, 26.70, 1.54, 0.88), 4: (1398.39, 25.51, 2.50, 0.80), 5: (1407.01, 19.33, 1.89, 0.43),
            7: (1406.88, 19.64, 1.90, 0.79), 10: (1407.96, 19.47, 1.83, 0.34), 13: (1408.87, 23.47, 1.76, 0.71),
            15: (1408.94, 16.75, 1.75, 0.68), 17: (1418.97, 16.00, 1.05, 0.59), 21: (1417.50, 26.37, 1.17, 0.68),
        },
        "OneTimeScore": {
            3: (1444.68, 16.16, -0.74, 0.77), 4: (1448.43, 23.88, -1.00, 0.91), 5: (1457.76, 23.95, -1.65, 1.11),
            7: (1448.54, 20.05, -1.01, 0.97), 10: (1452.68, 15.51, -1.31, 1.44), 13: (1445.25, 12.84, -0.80, 1.78),
            15: (1453.11, 6.66, -1.34, 1.46), 17: (1450.95, 11.65, -1.19, 1.63), 21: (1452.79, 15.86, -1.31, 1.30),
        },
        "OneTimeEntropy": {
            3: (1441.52, 18.29, -0.52, 0.61), 4: (1447.35, 24.59, -0.92, 1.02), 5: (1450.36, 22.32, -1.13, 1.04),
            7: (1439.58, 16.68, -0.39, 1.20), 10: (1457.43, 15.44, -1.63, 1.29), 13: (1450.64, 14.74, -1.17, 1.72),
            15: (1460.17, 14.20, -1.83, 1.43), 17: (1457.15, 10.29, -1.62, 1.52), 21: (1447.35, 12.72, -0.93, 1.20),
        },
    },
}  # fmt: skip

# Token-level rejectors on XSUM by architecture and training strategy.
_ABLATION: dict[tuple[str, str], tuple[float, float, float, float]] = {
    ("mlp", "free"): (1375.48, 34.57, 4.07, 1.01),
    ("mlp", "teacher"): (1387.49, 25.96, 3.22, 1.25),
    ("mlp", "scheduled"): (1377.01, 31.92, 3.96, 1.20),
    ("lstm", "free"): (1323.92, 25.34, 7.66, 0.96),
    ("lstm", "teacher"): (1340.43, 20.24, 6.49, 1.24),
    ("lstm", "scheduled"): (1324.83, 27.04, 7.60, 0.98),
}
_ABLATION_BASELINES = {
    "TokenwiseScore": (1354.78, 31.87, 5.51, 0.94),
    "TokenwiseEntropy": (1360.41, 31.50, 5.12, 0.62),
}


def published_hand_offs(task: str, method: str, size: int) -> PaperFigure | None:
    """Return the paper's figure for one-time deferral with `size` hand-offs, or None where it prints none."""
    found = _HAND_OFFS.get(task, {}).get(method, {}).get(size)
    return None if found is None else PaperFigure(*found)


def published_ablation(task: str, architecture: str, strategy: str) -> PaperFigure | None:
    """Return the paper's figure for a token-level rejector, or None where it prints none."""
    found = _ABLATION.get((architecture, strategy)) if task == "xsum" else None
    return None if found is None else PaperFigure(*found)


def published_ablation_baseline(task: str, method: str) -> PaperFigure | None:
    """Return the paper's figure for a confidence rule in the ablation, or None where it prints none."""
    found = _ABLATION_BASELINES.get(method) if task == "xsum" else None
    return None if found is None else PaperFigure(*found)
