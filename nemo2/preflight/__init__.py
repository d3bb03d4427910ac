# SPDX-License-Identifier: Apache-2.0
"""What is known before a run: rules, rehearsal, plan, explanation, and the state of the machine."""
