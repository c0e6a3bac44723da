import asyncio

import acemq
from acemq import AceMQ, Credentials, Opening, SecurityError, Tls


def shop() -> Opening[AceMQ]:
    return acemq.connect(
        "amqps://rabbit-1.example,rabbit-2.example/shop",
        credentials=Credentials.env("SHOP_USER", "SHOP_PASSWORD"),
        tls=Tls(ca_file="/etc/ssl/shop-authority.pem"),
    )


async def main() -> None:
    try:
        async with shop() as mq:
            await mq.send("orders", "o-1")
    except SecurityError as error:
        print(error.setting, "–", error)

    print(Credentials("shop", "s3cret"))


asyncio.run(main())
