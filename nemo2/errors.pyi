# SPDX-License-Identifier: Apache-2.0
from nemo2.base.errors import CheckpointError as CheckpointError
from nemo2.base.errors import ConfigError as ConfigError
from nemo2.base.errors import DamagedCheckpointError as DamagedCheckpointError
from nemo2.base.errors import DataError as DataError
from nemo2.base.errors import Nemo2Error as Nemo2Error
from nemo2.base.errors import OutputExists as OutputExists
from nemo2.base.errors import Preempted as Preempted
from nemo2.base.errors import RunFinished as RunFinished
from nemo2.base.errors import RuntimeFault as RuntimeFault
from nemo2.base.errors import SaveFailed as SaveFailed
from nemo2.base.errors import SecurityError as SecurityError
from nemo2.base.errors import UnknownNameError as UnknownNameError
