# SPDX-License-Identifier: Apache-2.0
"""The recipes: one module of facts each, loaded when they are asked for."""

if __name__ != "nemo2.recipes":
    raise ImportError("This folder is installed as `nemo2.recipes`: write `from nemo2.recipes import llama3_8b`.")
