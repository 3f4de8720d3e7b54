"""Tasks that are not Python functions: an HTTP request, a shell command with a template, a program that writes JSON lines.

`evertick dags trigger kinds --param url=https://example.org/ --wait` runs it; without a URL it checks the health of `evertick up`.
"""

from evertick import Param, dag, http, program, shell, task

# Any language works: the interface is the environment and the lines on standard output.
COUNT = """
echo '{"evertick": "log", "text": "counting"}'
set -- $PAGE
echo "{\\"evertick\\": \\"result\\", \\"value\\": $#}"
"""


@task
def judge(words: int) -> str:
    return "a long page" if words > 100 else "a short page"


@dag(
    tags=["example"],
    params={"url": Param("http://127.0.0.1:8790/monitor/health", pattern="https?://.+", description="What to fetch")},
)
def kinds() -> None:
    """Fetch a page, count its words, say how long it is."""
    # A value in a URL is escaped; this one is the URL. 429 and 5xx are retried, other errors are not.
    page = http("fetch", "{{ params.url | unquoted }}", response="text", retries=3, retry_delay="2s")
    words = program("count", ["sh", "-c", COUNT], env={"PAGE": page})
    # A value in a command becomes a quoted variable, whatever it contains.
    shell("say", "echo {{ params.url }} is {{ inputs.verdict }}", inputs={"verdict": judge(words)})
