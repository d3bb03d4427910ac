# SPDX-License-Identifier: Apache-2.0
from nemo2.config.aliases import aliases_of as aliases_of
from nemo2.config.aliases import register_aliases as register_aliases
from nemo2.config.capture import captured_arguments as captured_arguments
from nemo2.config.capture import configurable as configurable
from nemo2.config.html import Config as Config
from nemo2.config.html import Partial as Partial
from nemo2.config.overrides import apply_overrides as apply_overrides
from nemo2.config.reading import from_json as from_json
from nemo2.config.serialize import check_serialisable as check_serialisable
from nemo2.config.serialize import to_json as to_json
from nemo2.config.show import diff as diff
from nemo2.config.show import flatten as flatten
from nemo2.config.show import render as render
from nemo2.config.walk import select as select
from nemo2.config.walk import who_set as who_set
from nemo2.config.yaml_form import from_yaml as from_yaml
from nemo2.config.yaml_form import to_yaml as to_yaml
