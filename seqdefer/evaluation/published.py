"""What the paper prints in its table of results: AUDC (std), % improvement over Random (std), by task and method."""

from __future__ import annotations

from seqdefer.evaluation.results import PaperFigure

_WEATHER = {
    "Random": (555.33, 174.75, 0.0, 0.0),
    "OptimalToken": (36.66, 4.34, 93.01, 1.47),
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
    "OptimalOneTime": (0.0, 0.0, 100.0, 0.0),
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
    "OptimalToken": (1212.00, 46.85, 15.48, 1.50),
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
