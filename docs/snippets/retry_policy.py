from datetime import timedelta

from acemq import RetryPolicy, Topology

policy = RetryPolicy.exponential(6, first=timedelta(seconds=5), ceiling=timedelta(minutes=2))
for attempt, wait in enumerate(policy.schedule(), start=1):
    print(f"after attempt {attempt}: {policy.decide(attempt, age=None).where} waits {wait}")

patient = (
    policy.give_up_after(timedelta(hours=1))  # whatever attempts are left
    .except_for(KeyError)  # to the dead letters at once
    .wait_in_broker_from(timedelta(seconds=10))
)
print("rungs:", *(f"{wait.seconds} s" for wait in patient.rungs()))

print(Topology().queue("orders", retry=policy))
