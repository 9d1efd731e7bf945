"""Three questions that a data engineer asks of an archive, answered in Spark.

    pip install 'lowwater[spark]' matplotlib
    python examples/spark_history.py            # or cell by cell, in an editor that knows `# %%`

It makes its own archive first: three days of a shop's price list, with a deploy that went wrong. Tables are
printed, and plots go to the folder `spark_history`. No Java is needed: a wheel has one.
"""

# %% An archive: three days of changes, as a program that orders its own entries would have written them
from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

import lowwater
import lowwater.spark

OUT = Path("spark_history")
TODAY = datetime(2026, 3, 12, tzinfo=UTC)
BEGIN, YESTERDAY = TODAY - timedelta(days=3), TODAY - timedelta(days=1)
DEPLOY = YESTERDAY + timedelta(hours=14, minutes=5)
PRODUCTS = [f"product-{number:03}" for number in range(300)]


class Orderer:
    """Orders a shop's entries. What the engine asks for, to record what was shipped, it orders too."""

    def __init__(self, folder: Path) -> None:
        self.seq = 0
        self.wanted: list[Any] = []
        self.engine = lowwater.Engine(
            folder / "data", tier=f"file://{folder.resolve()}/archive", orchestrator=self
        )
        self.order(lowwater.Create(b"a shop's history", b"and some salt..."))

    def order(self, entry: Any) -> None:
        self.seq += 1
        self.engine.apply_log_entry(self.seq, entry)

    def ship(self) -> None:
        target = self.seq
        while self.engine.counted_hwm < target:
            self.engine.propose_seal()
            while self.wanted:
                self.order(self.wanted.pop(0))
            self.engine.sync()
            self.engine.update_low_water_mark(self.engine.marks().durable)
            time.sleep(0.05)

    def propose(self, entry: Any) -> None:
        self.wanted.append(entry)

    def get_low_water_mark(self) -> int:
        return 0

    def fetch_log_entries(self, seq_first: int, seq_last: int) -> Iterator[Any]:
        raise NotImplementedError("there is one engine, and it never lags behind")


def price_changes(rng: random.Random) -> Iterator[tuple[datetime, str, bytes | None]]:
    """More of them by day than by night, and most for a few products, which are others each day."""
    for minutes in range(int((TODAY - BEGIN).total_seconds() / 60)):
        now = BEGIN + timedelta(minutes=minutes)
        if now == DEPLOY:
            for product in PRODUCTS[::2]:
                yield now, product, b"0.00"
            for product in PRODUCTS[1::30]:
                yield now, product, None
        busy = 6 if 8 <= now.hour < 20 else 2
        for _ in range(rng.randrange(busy)):
            favourites = PRODUCTS[now.day % 7 * 40 :][:8]
            product = rng.choice(favourites if rng.random() < 0.5 else PRODUCTS)
            yield now, product, b"%.2f" % rng.lognormvariate(3, 0.5)


shutil.rmtree(OUT, ignore_errors=True)
OUT.mkdir()
shop = Orderer(OUT)
shop.order(lowwater.CreateBucket("prices", time_us=int(BEGIN.timestamp() * 1e6)))
rng = random.Random(7)
first = [(BEGIN, product, b"%.2f" % rng.lognormvariate(3, 0.5)) for product in PRODUCTS]
for now, product, price in [*first, *price_changes(rng)]:
    time_us = int(now.timestamp() * 1e6)
    if price is None:
        shop.order(lowwater.Delete("prices", product, time_us=time_us))
    else:
        shop.order(lowwater.Put("prices", product, price, time_us=time_us))
shop.ship()
shop.engine.close()
ARCHIVE = f"file://{OUT.resolve()}/archive"
print(f"an archive of {shop.seq:,} entries, from {BEGIN:%Y-%m-%d} to {TODAY:%Y-%m-%d}\n")

# %% A session, and what is in there
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

spark = lowwater.spark.session(master="local[2]", config={"spark.sql.shuffle.partitions": 4})
log = spark.read.format("lowwater").load(ARCHIVE)
log.groupBy("kind").agg(F.count("*").alias("entries"), F.max("time").alias("last")).orderBy("kind").show()

# %% 1. What changed yesterday?
end = TODAY - timedelta(microseconds=1)
changed = lowwater.spark.changes(spark, ARCHIVE, start=YESTERDAY, end=end, bucket="prices")
described = changed.select(
    F.hour("time").alias("hour"),
    "key",
    F.when(F.col("kind").startswith("delete"), "deleted")
    .when(F.col("before_seq").isNull(), "new")
    .when(F.col("value").cast("string") == "0.00", "set to zero")
    .otherwise("another price")
    .alias("what"),
    F.col("before_value").cast("string").cast("double").alias("before"),
    F.col("value").cast("string").cast("double").alias("after"),
).cache()
print("What changed yesterday, and by how much:")
described.groupBy("what").agg(
    F.count("*").alias("changes"),
    F.countDistinct("key").alias("products"),
    F.round(F.avg(F.col("after") - F.col("before")), 2).alias("on average"),
).orderBy("what").show()

counts = {(row.hour, row.what): row["count"] for row in described.groupBy("hour", "what").count().collect()}
figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
bottoms = [0] * 24
for what, colour in (
    ("another price", "#1f6f8b"),
    ("new", "#7fb069"),
    ("deleted", "#444444"),
    ("set to zero", "#d1495b"),
):
    heights = [counts.get((hour, what), 0) for hour in range(24)]
    axis.bar(range(24), heights, bottom=bottoms, label=what, color=colour)
    bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
axis.set_title(f"What changed on {YESTERDAY:%A, %-d %B}", loc="left")
axis.set_xlabel("hour (UTC)")
axis.set_ylabel("changes")
axis.set_xticks(range(0, 24, 2))
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
figure.savefig(OUT / "changed.png", dpi=120)

# %% 2. What was there before the deploy that went wrong?
before = lowwater.spark.state_as_of(spark, ARCHIVE, DEPLOY - timedelta(microseconds=1), bucket="prices")
after = lowwater.spark.state_as_of(spark, ARCHIVE, DEPLOY + timedelta(minutes=1), bucket="prices")
price = F.col("value").cast("string").cast("double")
both = (
    before.select("key", "seq", price.alias("was"))
    .join(after.select("key", price.alias("became")), "key", "left")
    .cache()
)
damaged = both.filter("became is null or (became = 0 and was > 0)")
print(f"Before the deploy there were {before.count()} prices, after it {after.count()}; to be put back:")
damaged.orderBy(F.desc("was")).show(5)

prices = both.collect()
figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
bins = [step * 2.5 for step in range(45)]
axis.hist([row.was for row in prices], bins, color="#1f6f8b", label="before", alpha=0.9)
axis.hist(
    [row.became for row in prices if row.became is not None],
    bins,
    color="#d1495b",
    label="after",
    histtype="step",
    linewidth=2,
)
axis.set_title(f"All prices, just before and after {DEPLOY:%-d %B, %H:%M}", loc="left")
axis.set_xlabel("price")
axis.set_ylabel("products")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
figure.savefig(OUT / "deploy.png", dpi=120)

# %% 3. Which keys are the hottest, hour by hour?
writes = log.filter("bucket = 'prices' and kind in ('put', 'delete')")
hourly = writes.groupBy(F.date_trunc("hour", "time").alias("hour"), "key").count()
rank = F.row_number().over(Window.partitionBy("hour").orderBy(F.desc("count"), "key"))
hottest = hourly.withColumn("rank", rank).filter("rank <= 3").cache()
print("The hottest keys of the busiest hours:")
hottest.orderBy(F.desc("count"), "hour").show(6)

of_hours = hottest.groupBy("key").agg(F.count("*").alias("hours"), F.sum("count").alias("writes"))
shown = [row.key for row in of_hours.orderBy(F.desc("hours"), F.desc("writes"), "key").limit(16).collect()]
hours = [BEGIN + timedelta(hours=number) for number in range(72)]
found = hourly.filter(F.col("key").isin(shown)).select(F.unix_timestamp("hour").alias("at"), "key", "count")
heat = {(row.key, row.at): row["count"] for row in found.collect()}
figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
image = axis.imshow(
    [[heat.get((key, int(hour.timestamp())), 0) for hour in hours] for key in sorted(shown)],
    aspect="auto",
    cmap="magma_r",
    interpolation="nearest",
)
axis.set_yticks(range(len(shown)), sorted(shown), fontsize=8)
axis.set_xticks(range(0, 72, 12), [f"{hour:%a %H:00}" for hour in hours[::12]])
axis.set_title("Writes an hour to the keys that were among the hottest three most often", loc="left")
figure.colorbar(image, label="writes")
figure.savefig(OUT / "hottest.png", dpi=120)

# %% The end
spark.stop()
print(f"plots are in {OUT}/: changed.png, deploy.png and hottest.png")
