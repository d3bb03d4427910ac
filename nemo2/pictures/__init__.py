# SPDX-License-Identifier: Apache-2.0
"""Pictures as text: SVG and HTML without a plotting library, a server, a script or anything loaded from elsewhere."""

from nemo2.pictures.charts import Bar, Limit, Mark, Point, Series, line_chart, scatter_chart, stacked_bars
from nemo2.pictures.page import page
from nemo2.pictures.svg import Canvas, standalone

__all__ = [
    "Bar",
    "Canvas",
    "Limit",
    "Mark",
    "Point",
    "Series",
    "line_chart",
    "page",
    "scatter_chart",
    "stacked_bars",
    "standalone",
]
