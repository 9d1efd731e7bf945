"""What `pyproject.toml` cannot say yet: the compiled loops, without which everything works as well.

A wheel without them is one for any platform, and says so. pip keeps what it has built of a source
distribution, or of a repository at a full commit hash, under the address that it came from, and serves each
wheel there whose tags fit. By its tag the compiled one comes first wherever both are, in that cache or in a
folder of wheels, and neither takes the place of the other. No tag that fits has pip build again once there is
a compiler: a wheel without loops is served as long as it is alone. `pip cache remove lowwater` ends that.
"""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    def run(self):
        loops = self.get_finalized_command("build_ext").get_outputs()
        # Those of an earlier build in this folder may be of other sources, or of a compiler that is gone.
        if not self.distribution.have_run.get("build_ext"):
            for path in filter(os.path.exists, loops):
                os.remove(path)
        # Whether an optional extension is there is known when it was tried.
        self.run_command("build")
        if not any(map(os.path.exists, loops)):
            self.distribution.ext_modules = None
            self.root_is_pure = True
        super().run()


setup(
    cmdclass={"bdist_wheel": Wheel},
    ext_modules=[
        # Where there is no compiler, or no headers of Python, it is left out.
        Extension(
            "lowwater.engine.format._fast",
            [
                "engine/format/_fast.c",
                "engine/format/_fast_frames.c",
                "engine/format/_fast_hashes.c",
                "engine/format/_fast_lmdb.c",
                "engine/format/_fast_merging.c",
            ],
            depends=["engine/format/_fast.h"],
            # What is shared by these files is nobody else's.
            extra_compile_args=["-O3", "-fvisibility=hidden"],
            optional=True,
        )
    ],
)
