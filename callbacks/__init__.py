# SPDX-License-Identifier: Apache-2.0
"""The callbacks: one Lightning callback per file, loaded when asked for."""

if __name__ != "nemo2.callbacks":
    raise ImportError("This folder is installed as `nemo2.callbacks`: write `from nemo2.callbacks import TimingCallback`.")
