# SPDX-License-Identifier: Apache-2.0
"""How a model is sharded over ranks: the layout, its process groups, and the step that runs on them."""
