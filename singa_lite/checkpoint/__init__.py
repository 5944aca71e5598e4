# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a whole job: what every rank needs to go on, of one step, whole or not there.

``save_job(folder, model)`` and ``load_job(folder, model)`` are called by all ranks; docs/jobs.md is their page. A file
of a single model is ``Model.save_states``.
"""

from .job import Job
from .load import load_job
from .save import save_job
from .saving import Saving

__all__ = ["Job", "Saving", "load_job", "save_job"]
