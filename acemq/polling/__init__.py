"""A transport out of seven verbs: for a broker of one's own that can be asked, and never speaks first."""

from acemq.polling.transport import PollingTransport as PollingTransport
