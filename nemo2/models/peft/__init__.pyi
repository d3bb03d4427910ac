# SPDX-License-Identifier: Apache-2.0
from nemo2.models.peft.base import PEFT as PEFT
from nemo2.models.peft.canonical_dora import CanonicalDoRA as CanonicalDoRA
from nemo2.models.peft.canonical_lora import CanonicalLoRA as CanonicalLoRA
from nemo2.models.peft.dora import DoRA as DoRA
from nemo2.models.peft.lora import LoRA as LoRA
from nemo2.models.peft.targets import ModuleMatcher as ModuleMatcher
