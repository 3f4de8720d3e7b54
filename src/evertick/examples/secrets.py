"""A secret, a connection and a variable: only the tasks that declare them receive them, and no log shows them.

Set them first; each command asks for the value, or reads it from a pipe:
    evertick secrets set shop_token; evertick connections set warehouse; evertick variables set region
"""

from evertick import TaskContext, dag, shell, task


@task(secrets=["shop_token"], variables=["region"])
def fetch(context: TaskContext) -> str:
    """The secret is masked in the output, in encoded forms and in errors, too."""
    token = context.secrets["shop_token"]
    print("asking with", token, "which is", token.encode().hex(), "in hex")
    return f"orders of {context.variables['region']}"


@task(connections=["warehouse"])
def store(orders: str, context: TaskContext) -> str:
    warehouse = context.connections["warehouse"]
    print("storing to", warehouse.uri)
    return f"{orders} stored on {warehouse.host}"


@dag(tags=["example"])
def secrets() -> None:
    """Fetch with a token, store with a password, and report with a command."""
    stored = store(fetch())
    # In a command a secret is an environment variable, like every value of a template; never an argument.
    shell(
        "tell",
        "echo {{ inputs.stored }} with {{ secrets.shop_token }}",
        inputs={"stored": stored},
        secrets=["shop_token"],
    )
