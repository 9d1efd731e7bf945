"""A stream in a process of its own, to be killed: from an archive into Parquet, until all is there."""

from __future__ import annotations

import sys


def main(uri: str, folder: str) -> None:
    import lowwater.spark

    config = {
        "spark.sql.shuffle.partitions": 1,
        "spark.driver.memory": "1g",
        "spark.local.dir": f"{folder}/local",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }
    spark = lowwater.spark.session(master="local[2]", config=config, app_name="stream")
    entries = spark.readStream.format("lowwater").option("batch_segments_max", 1).load(uri)
    query = (
        entries.writeStream.format("parquet")
        .option("path", f"{folder}/sink")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
