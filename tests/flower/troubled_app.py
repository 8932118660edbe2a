"""An app whose nodes may be slow, bad or stuck, as their node config says."""

import time
from pathlib import Path

from bad_replies import spoil
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpmt.flower import paper_apps
from fedpmt.flower.factory import SECURE_ANSWERS

apps = paper_apps()
server = apps.server
client = ClientApp()


@client.query()
def describe(message: Message, context: Context) -> Message:
    return apps.client(message, context)


for action in SECURE_ANSWERS:
    client.train(action)(apps.client)


@client.train()
def train(message: Message, context: Context) -> Message:
    stuck = context.node_config.get("stuck-file")
    if stuck and message.content.config_records["task"]["round"] == 1:
        Path(str(stuck)).touch()
        time.sleep(3600)
    reply = apps.client(message, context)
    time.sleep(float(context.node_config.get("slow-seconds", 0)))
    if context.node_config.get("bad"):
        spoil(message.content, reply.content)
    return reply
