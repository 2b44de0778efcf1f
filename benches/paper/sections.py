"""The sections of the page, one for every figure.

Each is a function of the numbers of its figure and of a folder for its plots (or None). It returns rows of
the summary and the text. A row has the figure, the paper's number, ours, their ratio, and the reason of
the difference.
"""

from cost_sections import figure_18a, figure_18b, figure_19a, figure_19b
from more_sections import ablation, engine, today
from serving_sections import (
    figure_2,
    figure_11,
    figure_12,
    figure_13,
    figure_14,
    figure_15,
    figure_16,
    figure_17,
    table_1,
)

ALL = [
    table_1,
    figure_2,
    figure_11,
    figure_12,
    figure_13,
    figure_14,
    figure_15,
    figure_16,
    figure_17,
    figure_18a,
    figure_18b,
    figure_19a,
    figure_19b,
    ablation,
    today,
    engine,
]
