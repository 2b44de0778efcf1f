"""The sections of the page, one for every figure.

Each is a function of the numbers of its figure and of a folder for its plots (or None). It returns rows of
the summary and the text. A row has the figure, the paper's number, ours, their ratio, and the reason of
the difference.
"""

import cost_sections as cost
import more_sections as more
import serving_sections as serving

ALL = [
    serving.table_1,
    serving.figure_2,
    serving.figure_11,
    serving.figure_12,
    serving.figure_13,
    serving.figure_14,
    serving.figure_15,
    serving.figure_16,
    serving.figure_17,
    cost.figure_18a,
    cost.figure_18b,
    cost.figure_19a,
    cost.figure_19b,
    more.ablation,
    more.today,
    more.engine,
]
