"""A long task that stops cleanly when it is canceled or its runner drains, and continues where it stopped."""

from pathlib import Path

from evertick import Param, RetryAfter, TaskContext, dag, task


@task(retries=100, timeout="12h")
def convert(files: int, folder: str, context: TaskContext) -> int:
    mark = Path(folder, f"run-{context.run_id}.done")
    done = int(mark.read_text(encoding="utf-8")) if mark.exists() else 0
    for number in range(done, files):
        if context.is_cancelled():
            raise RetryAfter(60, f"stopped after {number} files")
        mark.write_text(str(number + 1), encoding="utf-8")
    mark.unlink(missing_ok=True)
    return files


@dag
def convert_files(files: int = Param(1000), folder: str = Param(".")) -> None:
    convert(files, folder)
