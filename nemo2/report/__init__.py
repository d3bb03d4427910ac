# SPDX-License-Identifier: Apache-2.0
"""What is looked at: charts, pages, and traces of what ran when."""
