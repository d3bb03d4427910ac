# SPDX-License-Identifier: Apache-2.0
from nemo2.base.backend.base import Backend as Backend
from nemo2.base.backend.chosen import get_backend as get_backend
