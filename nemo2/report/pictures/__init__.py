# SPDX-License-Identifier: Apache-2.0
"""Pictures as text: SVG and HTML without a plotting library, a server, a script or anything loaded from elsewhere."""
