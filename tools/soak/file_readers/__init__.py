# SPDX-License-Identifier: Apache-2.0
"""Every place where the package reads a file.

Not in the table, as only the package's own running processes write them: /proc, the anonymous files of stacks
(comm/stacks.py), results that a child process hands to its parent (bench/sync.py, allreduce.py, validation_rank.py,
measure.py), and the package's own sources (backend/formulas.py, the .cu files). There are no readers of ONNX, of
SINGA's snapshots, of nnabla's parameters, or of a link's text in a file.
"""

from __future__ import annotations

from tools.soak.file_readers import data, states, text
from tools.soak.file_readers.reader import Reader

SEAL = states.seal_manifest
READERS = (
    # name, module, checksum, what is free without one, make, start, variants, is_bound, seal
    Reader("model", "model_file.py", "CRC-32", "", states.make_model_file, states.start_model_file),
    Reader("job", "generation.py", "SHA-256", "", states.make_job, states.start_job, 4, True, SEAL),
    Reader(
        "job of 3 ranks", "resize.py", "SHA-256", "", states.make_resized_job, states.start_job, 3, True, SEAL
    ),
    Reader(
        "job, launcher", "restart.py", "SHA-256", "", states.make_job, states.start_launcher, 4, False, SEAL
    ),
    Reader("store", "kvstore/states.py", "CRC-32", "", states.make_store, states.start_store, 4),
    Reader("Trainer", "gluon/trainer.py", "CRC-32", "", states.make_trainer, states.start_trainer),
    Reader("MNIST", "data/mnist.py", "", "pixels", data.make_idx, data.start_idx),
    Reader("MNIST gz", "data/mnist.py", "CRC-32", "", data.make_idx_gz, data.start_idx),
    Reader("MNIST cache", "data/mnist.py", "SHA-256", "", data.make_idx, data.start_idx_cache, 1),
    Reader("MNIST wheel", "data/mnist.py", "SHA-256", "", data.make_wheel, data.start_wheel, 1),
    Reader("CIFAR-10", "data/cifar.py", "", "pixels", data.make_records, data.start_records),
    Reader("CIFAR-10 archive", "data/cifar.py", "CRC-32", "", data.make_archive, data.start_records),
    Reader("CIFAR-10 cache", "data/cifar.py", "SHA-256", "", data.make_archive, data.start_archive_cache, 1),
    Reader("bench run", "bench/runs.py", "SHA-256", "", text.make_run, text.start_run),
    Reader("bench tables", "bench/compare.py", "", "numbers", text.make_tables, text.start_tables),
    Reader(
        "calibration", "bench/calibration.py", "", "numbers", text.make_calibration, text.start_calibration
    ),
    Reader(
        "trace parts", "comm/trace_file.py", "", "times", text.make_trace, text.start_trace, also=(OSError,)
    ),
    Reader("progress", "comm/progress.py", "", "numbers", text.make_progress, text.start_progress),
    Reader("flight record", "comm/flight_record.py", "", "calls", text.make_flight, text.start_flight),
    Reader("hosts", "launch/hosts.py", "", "names", text.make_hosts, text.start_hosts),
    Reader("members", "comm/lost_ranks.py", "", "numbers", text.make_members, text.start_members),
)
