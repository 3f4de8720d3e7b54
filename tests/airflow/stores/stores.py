"""Assets and state as people use them in Airflow, with no word of Evertick."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Asset, AssetAlias, asset

try:
    from airflow.sdk.log import mask_secret
except ImportError:  # before 3.1
    from airflow.sdk.execution_time.secrets_masker import mask_secret

ORDERS = Asset("orders", uri="s3://shop/orders", group="shop", extra={"owner": "sales"})
DAILY = AssetAlias("daily")
SETTINGS = {"start_date": datetime(2026, 1, 1), "is_paused_upon_creation": False}


def make(outlet_events):
    outlet_events[ORDERS].extra = {"rows": 7}


def through(outlet_events):
    outlet_events[DAILY].add(Asset("day-1", uri="s3://shop/day-1"), extra={"n": 1})


def fails(outlet_events):
    outlet_events[ORDERS].extra = {"rows": "never"}
    raise ValueError("an update of an attempt that fails does not count")


def looks(inlet_events):
    found, aliased = inlet_events[ORDERS], inlet_events[DAILY]
    return [len(found), found[-1].extra, found[-1].source_task_id, [each.asset.name for each in aliased]]


def keeps(**context):
    if "task_state_store" not in context:  # before 3.3
        return ["job-1", "seen", None]
    mine, orders = context["task_state_store"], context["asset_state_store"]
    if mine.get("job") is None:
        mine.set("job", "job-1", retention=timedelta(hours=1))
        mine.set("old", 1)
        orders.set("cursor", {"seen": "seen"})
        raise ValueError("the next try finds what this one has kept")
    mine.delete("old")
    return [mine.get("job"), orders.get("cursor")["seen"], mine.get("old")]


def hides():
    mask_secret({"token": "hush-hush-1"})
    print("it is hush-hush-1")
    subprocess.run(["echo", "raw hush-hush-1"], check=True)
    raise ValueError("not hush-hush-1")


def consumed(triggering_asset_events):
    return {key.name: [each.extra for each in found] for key, found in triggering_asset_events.items()}


with DAG("makes", schedule=None, **SETTINGS) as makes:
    first = PythonOperator(task_id="fails", python_callable=fails, outlets=[ORDERS])
    second = PythonOperator(task_id="make", python_callable=make, outlets=[ORDERS], trigger_rule="all_failed")
    third = PythonOperator(task_id="through", python_callable=through, outlets=[DAILY])
    fourth = PythonOperator(task_id="looks", python_callable=looks, inlets=[ORDERS, DAILY])
    fifth = PythonOperator(
        task_id="keeps", python_callable=keeps, inlets=[ORDERS], retries=1, retry_delay=timedelta(seconds=0.1)
    )
    PythonOperator(task_id="hides", python_callable=hides)
    first >> second >> third >> fourth >> fifth

with DAG("follows", schedule=[ORDERS], **SETTINGS):
    PythonOperator(task_id="consumed", python_callable=consumed)

with DAG("follows_alias", schedule=DAILY, **SETTINGS):
    PythonOperator(task_id="consumed", python_callable=consumed)


@asset(uri="s3://shop/report", schedule=ORDERS, is_paused_upon_creation=False)
def report(self, orders):
    return [self.uri, orders.uri, orders.extra]
