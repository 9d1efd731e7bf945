"""One measurement, in a process of its own: `python -m bench.child JOB`, where JOB is JSON.

Always true: the answer is one line of JSON on standard output, and nothing else is written there. An error
ends the process with a traceback on standard error instead.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench import claims_jobs, engine_ours, engine_peers, ours, peers, shipping_jobs
from bench.loops import Contender, Job

# The raw loop is the yardstick and comes first; ours stand next to it, because the machine drifts.
LOG: dict[str, list[Contender]] = {
    workload: [*others[:1], *ours.CONTENDERS[workload], *others[1:]]
    for workload, others in peers.CONTENDERS.items()
}
ENGINE: dict[str, list[Contender]] = {
    workload: [*mine, *engine_peers.CONTENDERS.get(workload, [])]
    for workload, mine in engine_ours.CONTENDERS.items()
}
# No two benchmarks have a workload of the same name.
SHIPPING = {**shipping_jobs.CONTENDERS, **claims_jobs.CLAIMS}
CONTENDERS = {**LOG, **ENGINE, **SHIPPING, "recovery": [engine_ours.RECOVERY]}


def _answer(phase: str, job: Job) -> dict[str, Any]:
    contender = next(each for each in CONTENDERS[job.workload] if each.name == job.contender)
    if job.workload == "read":
        # "Per core" is meant: threads of a library share this one core.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    try:
        if phase == "prepare":
            assert contender.prepare is not None
            contender.prepare(job)
            return {"status": "ok"}
        return {"status": "ok", **contender.run(job)}
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lowwater."):
            raise  # ours is installed and broken: that is no absence
        return {"status": "unavailable", "reason": f"{error}: pip install 'lowwater[bench]'"}


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])
    phase = spec.pop("phase")
    answer = _answer(phase, Job(**{**spec, "directory": Path(spec["directory"])}))
    sys.stderr.flush()
    os.write(answers, json.dumps(answer).encode())
    # The directory is thrown away or was closed by who prepared it: closing here would only take time.
    os._exit(0)


if __name__ == "__main__":
    main()
