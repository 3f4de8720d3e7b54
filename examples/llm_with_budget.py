"""Stream answers of an LLM for many texts, and stop when the run has used its budget of tokens."""

import json
from typing import Any
from urllib.request import Request, urlopen

from evertick import Fail, Param, dag, task


@task(rate={"llm": "60/1m"}, retries=4, retry_backoff="exponential", never_on=[ValueError], timeout="5m")
def summarize(text: str, url: str, max_tokens: int) -> dict[str, Any]:
    body = json.dumps({"prompt": f"Summarize: {text}", "stream": True}).encode()
    words, tokens = [], 0
    with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=60) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            words.append(json.loads(line[6:])["text"])
            tokens += 1
            if tokens > max_tokens:
                raise Fail(f"more than {max_tokens} tokens for one text")
    return {"summary": "".join(words), "tokens": tokens}


@task
def bill(answers: list[dict[str, Any]], budget: int) -> int:
    used: int = sum(answer["tokens"] for answer in answers)
    if used > budget:
        raise Fail(f"{used} tokens used, the budget is {budget}")
    return used


@dag(schedule="0 7 * * *", max_active_runs=1)
def summaries(url: str = Param("http://llm.internal/v1/stream"), budget: int = Param(1000)) -> None:
    answers = summarize.partial(url=url, max_tokens=200).expand(text=["first text", "second text"])
    bill(answers, budget)
