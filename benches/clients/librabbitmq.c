/* The limit: the same work by a C client, librabbitmq, with as little as it can be done with.

   cc -O2 -o client librabbitmq.c -lrabbitmq
   client JOB HOST PORT USER PASSWORD QUEUE COUNT SIZE WINDOW PREFETCH ACK_EVERY RATE LIMIT

   Jobs: publish (persistent, mandatory, confirmed, with the headers that acemq writes), consume, and receive, which is
   consume timed from the sending of the first message. It prints one line, its figures as JSON. */
#define _GNU_SOURCE
#include <amqp.h>
#include <amqp_framing.h>
#include <amqp_tcp_socket.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>

#define CHANNEL 1
#define HEADERS 7

struct task {
    const char *job, *host, *user, *password, *queue;
    int port, size, prefetch, ack_every;
    long count, window;
    double rate, limit;
};

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void expect(amqp_rpc_reply_t reply, const char *what) {
    if (reply.reply_type != AMQP_RESPONSE_NORMAL) fail(what);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static int64_t micros(void) { /* since 1970 */
    struct timeval now;
    gettimeofday(&now, NULL);
    return now.tv_sec * INT64_C(1000000) + now.tv_usec;
}

static double cpu_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static double peak_rss_mb(void) {
    char line[256];
    long kb = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status) && sscanf(line, "VmHWM: %ld", &kb) != 1) continue;
    if (status) fclose(status);
    return kb / 1024.0;
}

static amqp_connection_state_t connect_to(const struct task *task) {
    amqp_connection_state_t connection = amqp_new_connection();
    amqp_socket_t *socket = amqp_tcp_socket_new(connection);
    if (!socket || amqp_socket_open(socket, task->host, task->port)) fail("no broker there");
    expect(amqp_login(connection, "/", 0, 131072, 0, AMQP_SASL_METHOD_PLAIN, task->user, task->password), "login refused");
    amqp_channel_open(connection, CHANNEL);
    expect(amqp_get_rpc_reply(connection), "no channel");
    return connection;
}

static void print_figures(long messages, double took, double cpu) {
    if (!messages) fail("no messages");
    printf("{\"rate\": %.1f, \"messages\": %ld, \"cpu_per_10k\": %.4f, \"rss_mb\": %.1f", messages / took, messages,
           cpu / messages * 1e4, peak_rss_mb());
}

/* Publishing */

static unsigned char *answered; /* by tag */
static long lowest = 1, confirmed;

static void settle(uint64_t tag) {
    if (!answered[tag]) {
        answered[tag] = 1;
        confirmed++;
    }
}

/* Take one confirm, if one comes within `patience`; NULL waits for it. */
static void take_confirm(amqp_connection_state_t connection, struct timeval *patience) {
    amqp_frame_t frame;
    int status = amqp_simple_wait_frame_noblock(connection, &frame, patience);
    if (status == AMQP_STATUS_TIMEOUT) return;
    if (status != AMQP_STATUS_OK) fail("the connection was lost");
    if (frame.frame_type != AMQP_FRAME_METHOD) return;
    if (frame.payload.method.id != AMQP_BASIC_ACK_METHOD) fail("returned, refused or closed");
    const amqp_basic_ack_t *ack = frame.payload.method.decoded;
    if (ack->multiple) {
        for (; lowest <= (long)ack->delivery_tag; lowest++) settle(lowest);
    } else {
        settle(ack->delivery_tag);
    }
}

static amqp_table_entry_t text(const char *name, const char *value) {
    amqp_table_entry_t entry = {.key = amqp_cstring_bytes(name), .value = {.kind = AMQP_FIELD_KIND_UTF8}};
    entry.value.value.bytes = amqp_cstring_bytes(value);
    return entry;
}

static amqp_table_entry_t integer(const char *name, int64_t value) {
    amqp_table_entry_t entry = {.key = amqp_cstring_bytes(name), .value = {.kind = AMQP_FIELD_KIND_I64}};
    entry.value.value.i64 = value;
    return entry;
}

static int write_order(char *into, int size) {
    int length = snprintf(into, size + 512,
                          "{\"id\":123456,\"t\":%lld,\"kind\":\"order.created\",\"customer\":{\"id\":9876,"
                          "\"name\":\"Ada Lovelace\",\"email\":\"ada@example.org\"},\"total\":129.95,"
                          "\"currency\":\"EUR\",\"tags\":[\"new\",\"web\"],\"pad\":\"",
                          (long long)micros());
    while (length < size - 2) into[length++] = 'x';
    into[length++] = '"';
    into[length++] = '}';
    return length;
}

static void wait_until(double moment) {
    double left = moment - seconds();
    if (left > 0) {
        struct timespec pause = {(time_t)left, (long)((left - (time_t)left) * 1e9)};
        nanosleep(&pause, NULL);
    }
}

static void publish(amqp_connection_state_t connection, const struct task *task) {
    char *body = malloc(task->size + 512), id[64];
    answered = calloc(task->count + 2, 1);
    amqp_confirm_select(connection, CHANNEL);
    expect(amqp_get_rpc_reply(connection), "no confirms");

    amqp_table_entry_t entries[HEADERS];
    amqp_basic_properties_t properties = {
        ._flags = AMQP_BASIC_CONTENT_TYPE_FLAG | AMQP_BASIC_HEADERS_FLAG | AMQP_BASIC_DELIVERY_MODE_FLAG |
                  AMQP_BASIC_MESSAGE_ID_FLAG,
        .content_type = amqp_cstring_bytes("application/json"),
        .delivery_mode = 2,
        .headers = {.num_entries = HEADERS, .entries = entries},
    };
    long sent = 0;
    struct timeval at_once = {0, 0};
    double cpu = cpu_seconds(), began = seconds();
    while (sent < task->count) {
        if (task->rate > 0) wait_until(began + sent / task->rate);
        amqp_bytes_t order = {.len = write_order(body, task->size), .bytes = body};
        snprintf(id, sizeof id, "%08lx-0000-4000-8000-%012lx", sent, sent);
        entries[0] = text("x-acemq-id", id);
        entries[1] = text("x-acemq-type", task->queue);
        entries[2] = integer("x-acemq-version", 1);
        entries[3] = text("x-acemq-correlation", id);
        entries[4] = integer("x-acemq-attempt", 1);
        entries[5] = integer("x-acemq-first-seen", micros() / 1000);
        entries[6] = text("x-acemq-origin", "acemq@localhost");
        properties.message_id = amqp_cstring_bytes(id);
        if (amqp_basic_publish(connection, CHANNEL, amqp_empty_bytes, amqp_cstring_bytes(task->queue), 1, 0,
                               &properties, order) != AMQP_STATUS_OK)
            fail("a message could not be written");
        sent++;
        while (sent - confirmed >= task->window) take_confirm(connection, NULL);
        /* What has come already, so that the broker need not wait for us to read it. */
        if (sent % 32 == 0)
            while (amqp_data_in_buffer(connection) || amqp_frames_enqueued(connection)) take_confirm(connection, &at_once);
        amqp_maybe_release_buffers(connection);
        if (sent % 64 == 0 && seconds() - began > task->limit) break;
    }
    while (confirmed < sent) take_confirm(connection, NULL);
    print_figures(sent, seconds() - began, cpu_seconds() - cpu);
    printf("}\n");
}

/* Consuming */

static int64_t sent_at(amqp_bytes_t body) {
    const char *found = memmem(body.bytes, body.len, "\"t\":", 4);
    return found ? atoll(found + 4) : 0;
}

static int by_size(const void *one, const void *other) {
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

static void consume(amqp_connection_state_t connection, const struct task *task, int timed) {
    int64_t *ages = calloc(task->count, sizeof *ages);
    long messages = 0;
    double cpu = 0, began = 0;
    amqp_basic_qos(connection, CHANNEL, 0, task->prefetch, 0);
    expect(amqp_get_rpc_reply(connection), "no prefetch");
    amqp_basic_consume(connection, CHANNEL, amqp_cstring_bytes(task->queue), amqp_empty_bytes, 0, 0, 0,
                       amqp_empty_table);
    expect(amqp_get_rpc_reply(connection), "no subscription");
    while (messages < task->count) {
        amqp_envelope_t delivery;
        struct timeval patience = {(long)task->limit + 20, 0};
        amqp_maybe_release_buffers(connection);
        expect(amqp_consume_message(connection, &delivery, &patience, 0), "no message");
        int64_t age = micros() - sent_at(delivery.message.body);
        if (!messages) {
            cpu = cpu_seconds();
            began = seconds() - (timed ? age / 1e6 : 0);
        }
        ages[messages++] = age;
        if (messages % task->ack_every == 0 || messages == task->count)
            amqp_basic_ack(connection, CHANNEL, delivery.delivery_tag, task->ack_every > 1);
        amqp_destroy_envelope(&delivery);
        if (messages % 64 == 0 && seconds() - began > task->limit) break;
    }
    print_figures(messages, seconds() - began, cpu_seconds() - cpu);
    if (timed) {
        qsort(ages, messages, sizeof *ages, by_size);
        printf(", \"p50_ms\": %.3f, \"p99_ms\": %.3f", ages[messages / 2] / 1e3, ages[messages * 99 / 100] / 1e3);
    }
    printf("}\n");
}

int main(int argc, char **argv) {
    if (argc != 14)
        fail("expected JOB HOST PORT USER PASSWORD QUEUE COUNT SIZE WINDOW PREFETCH ACK_EVERY RATE LIMIT");
    struct task task = {
        .job = argv[1], .host = argv[2], .port = atoi(argv[3]), .user = argv[4], .password = argv[5],
        .queue = argv[6], .count = atol(argv[7]), .size = atoi(argv[8]), .window = atol(argv[9]),
        .prefetch = atoi(argv[10]), .ack_every = atoi(argv[11]), .rate = atof(argv[12]), .limit = atof(argv[13]),
    };
    amqp_connection_state_t connection = connect_to(&task);
    if (!strcmp(task.job, "publish"))
        publish(connection, &task);
    else if (!strcmp(task.job, "consume") || !strcmp(task.job, "receive"))
        consume(connection, &task, task.job[0] == 'r');
    else
        fail("unknown job");
    amqp_connection_close(connection, AMQP_REPLY_SUCCESS);
    return 0;
}
