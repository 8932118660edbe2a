"""An app whose nodes may be slow or bad, as their node config says."""

import time

from bad_replies import spoil
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpmt.flower import paper_apps

apps = paper_apps()
server = apps.server
client = ClientApp()


@client.query()
def describe(message: Message, context: Context) -> Message:
    return apps.client(message, context)


@client.train()
def train(message: Message, context: Context) -> Message:
    reply = apps.client(message, context)
    time.sleep(float(context.node_config.get("slow-seconds", 0)))
    if context.node_config.get("bad"):
        spoil(message.content, reply.content)
    return reply
