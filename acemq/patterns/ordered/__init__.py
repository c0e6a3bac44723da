"""Order by key over many processes; a failure stops its partition and nothing else (CONTRACT.md section 5).

`described` is what is said about an ordered queue, `queue` is one in hand, `consumer` shares its partitions with other
processes, `partition` handles the messages of one.
"""
