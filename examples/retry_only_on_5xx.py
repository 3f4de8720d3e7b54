"""Retry what another attempt can repair: server errors and throttling, but no error of the request itself."""

from urllib.error import HTTPError
from urllib.request import urlopen

from evertick import Fail, Param, RetryAfter, dag, task


@task(retries=5, retry_delay="2s", retry_backoff="exponential", retry_jitter=0.3, timeout="1m")
def fetch(url: str) -> str:
    try:
        with urlopen(url, timeout=20) as response:
            return str(response.read(), "utf-8")
    except HTTPError as error:
        if error.code == 429:
            raise RetryAfter(float(error.headers.get("Retry-After", 30)), "throttled") from None
        if error.code < 500:
            raise Fail(f"{error.code} {error.reason}: another attempt would get the same answer") from None
        raise


@dag(schedule="@hourly")
def rates(url: str = Param("https://rates.example/latest")) -> None:
    fetch(url)
