"""Compile memfit's inner loops where a compiler is found; without one the package is pure Python, and slower."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = "src/memfit/**/_native.cpp"  # each becomes a module of its own beside it


class NativeBuildHook(BuildHookInterface[Any]):
    """Builds the modules `_native`: into the tree for an editable installation, else into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. Nothing that goes wrong ends the installation."""
        if os.environ.get("MEMFIT_PURE_PYTHON"):
            return
        self.folder = tempfile.mkdtemp()
        for number, source in enumerate(sorted(Path(self.root).glob(SOURCES))):
            target = source.with_name("_native" + str(sysconfig.get_config_var("EXT_SUFFIX")))
            try:
                if version == "editable":
                    target.unlink(missing_ok=True)  # of another version, perhaps; a process keeps what it loaded
                built = compiled(source, Path(self.folder, str(number)))
                if version == "editable":
                    shutil.copy(built, target)
                    continue
            except (Exception, SystemExit) as error:  # setuptools raises what its compilers do
                self.app.display_warning(f"memfit is installed without {source.parent.name}'s compiled part: {error}")
                continue
            build_data["force_include"][str(built)] = target.relative_to(Path(self.root, "src")).as_posix()
            build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files."""
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)


def compiled(source: Path, folder: Path) -> Path:
    """Compile a module into a folder and return its path. Raises whatever the compiler's driver does."""
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    flags = ["/O2", "/std:c++17", "/EHsc"] if os.name == "nt" else ["-O2", "-std=c++17", "-g0", "-fvisibility=hidden"]
    extension = Extension("_native", [str(source)], language="c++", extra_compile_args=flags)
    command = build_ext(Distribution({"name": "memfit", "ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(folder), str(folder / "objects")
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath("_native"))
