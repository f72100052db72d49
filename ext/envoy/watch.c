// The watcher, a dynamic module of Envoy: inserts a fragment into a request's body, and extracts marks (times, tokens,
// finish reason) from the response.  gateway/envoy/watch.lua does the same; test_watch.py tests both.
// The picker's ext_authz response has left the request's number and fragment in the metadata.  The marks go into the
// metadata for the access log, which gateway/marks.py parses; the first token and a stored response's id also go into a
// pipe, so that the picker gets them at once.  If the pipe is full, a line is lost; the log has the same facts later.
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// The part of Envoy's ABI v0.2 (source/extensions/dynamic_modules/abi/abi.h) that this module uses.
typedef struct {
  const char* ptr;
  size_t length;
} Text;
enum { REQUEST_HEADER = 0, RESPONSE_HEADER = 2, REQUEST_BODY = 0, RESPONSE_BODY = 2, DYNAMIC = 0, CONTINUE = 0 };
#define CALL(name) envoy_dynamic_module_callback_http_##name
#define ON(name) envoy_dynamic_module_on_http_filter_##name
bool CALL(get_header)(void*, int, Text key, Text* value, size_t index, size_t* count);
bool CALL(set_header)(void*, int, Text key, Text value);
size_t CALL(get_body_chunks_size)(void*, int);
bool CALL(get_body_chunks)(void*, int, Text*);
bool CALL(append_body)(void*, int, Text);
bool CALL(drain_body)(void*, int, size_t);
bool CALL(get_metadata_string)(void*, int, Text name, Text key, Text* value);
void CALL(set_dynamic_metadata_string)(void*, Text name, Text key, Text value);

#define TEXT(literal) ((Text){literal, sizeof(literal) - 1})
enum { COUNTS = 5, CONTENT = COUNTS, FAILURE, ECHO, OTHER, ID, REASON, TYPE };  // from ID on: the value's text is kept
enum { MAX_KEY = 30, MAX_TEXT = 140 };
#define IS(kind, literal) {kind, {literal, sizeof(literal) - 1}}
static const struct {
  int kind;  // below COUNTS: the value is a number of tokens
  Text key;
} KEYS[] = {
    IS(0, "prompt_tokens"), IS(0, "input_tokens"), IS(1, "cached_tokens"), IS(2, "completion_tokens"),
    IS(2, "output_tokens"), IS(3, "cache_read_input_tokens"), IS(4, "cache_creation_input_tokens"),
    IS(CONTENT, "content"), IS(CONTENT, "text"), IS(CONTENT, "delta"), IS(CONTENT, "reasoning_content"),
    IS(CONTENT, "reasoning"), IS(CONTENT, "thinking"), IS(CONTENT, "arguments"), IS(CONTENT, "partial_json"),
    IS(ECHO, "tools"), IS(ECHO, "metadata"), IS(ECHO, "schema"), IS(ECHO, "schema_"), IS(ECHO, "input"),
    IS(ECHO, "input_messages"),  // the client's own words, in which any key may stand
    IS(FAILURE, "error"), IS(ID, "id"), IS(REASON, "finish_reason"), IS(REASON, "stop_reason"), IS(TYPE, "type"),
};

typedef struct {
  enum { OUT, AFTER, VALUE, NUMBER, KEY, KEY_ESCAPE, STRING, STRING_ESCAPE } state;  // of the scan of the JSON
  bool inserts, watches, stream, ended, failed;
  int pipe, kind, length;
  char key[MAX_KEY], id[MAX_TEXT + 1], reason[MAX_TEXT + 1];  // id: of the stored response; reason: finish reason
  size_t size;
  long depth, echo;  // brackets that are open; those in which an echo lies, 0: outside
  long events, number, counts[COUNTS];
  double first_s, last_s;
} Watch;

static bool left_by_picker(void* envoy, Text key, Text* value) {
  return CALL(get_metadata_string)(envoy, DYNAMIC, TEXT("envoy.filters.http.ext_authz"), key, value) && value->length;
}

static void tell(Watch* self, void* envoy) {
  Text number;
  char line[MAX_TEXT + 40];
  if (!self->pipe || !left_by_picker(envoy, TEXT("x-kv-number"), &number) || number.length > 30) return;
  int length = snprintf(line, sizeof line, "%.*s %.4f %s\n", (int)number.length, number.ptr, self->first_s, self->id);
  if (write(self->pipe, line, length) != length) return;
}

static void content(Watch* self, void* envoy) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  self->last_s = now.tv_sec + now.tv_nsec / 1e9;
  self->events += self->stream;
  if (self->first_s) return;
  self->first_s = self->last_s;
  tell(self, envoy);
}

static int kind_of(Watch* self) {
  for (size_t i = 0; i < sizeof KEYS / sizeof KEYS[0]; i++) {
    const Text key = KEYS[i].key;
    if (!self->echo && (size_t)self->length == key.length && !memcmp(self->key, key.ptr, key.length)) return KEYS[i].kind;
  }
  return OTHER;
}

static void in_string(Watch* self, void* envoy, char c) {
  if (!self->size++ && self->kind == CONTENT) content(self, envoy);
  if (self->kind < ID) return;
  char* text = self->kind == ID ? self->id : self->reason;
  if (self->size == 1 && text[0]) self->kind = OTHER;  // keep the first value
  else if (self->size <= MAX_TEXT) text[self->size - 1] = c > ' ' && c < 127 && c != ',' ? c : '_', text[self->size] = 0;
}

static void scan(Watch* self, void* envoy, const char* here, size_t length) {
  for (const char* end = here + length; here < end; here++) {
    if (self->state == STRING && self->size && self->kind < ID)  // skip the rest of a string that is not kept
      while (here + 1 < end && *here != '"' && *here != '\\' && *here != '\n') here++;
    const char c = *here;
    const bool blank = c == ' ' || c == '\t' || c == '\r' || c == '\n', digit = c >= '0' && c <= '9';
    const bool opens = c == '{' || c == '[', closes = c == '}' || c == ']';
    if (self->state < KEY && opens) self->depth++;
    if (self->state < KEY && closes && self->depth-- == self->echo) self->echo = 0;
    if (self->state == OUT && c == '"') {
      self->state = KEY, self->length = 0;
    } else if (self->state == KEY) {
      if (c == '"') self->state = AFTER;
      else if (c == '\n') self->state = OUT;  // not allowed in a JSON string: resynchronize at the next event
      else if (c == '\\') self->state = KEY_ESCAPE, self->length = MAX_KEY;
      else if (self->length < MAX_KEY) self->key[self->length++] = c;
    } else if (self->state == AFTER && !blank) {
      self->state = c == ':' ? VALUE : c == '"' ? KEY : OUT;
      if (c == ':') self->kind = kind_of(self);
      self->length = 0;
    } else if (self->state == VALUE && !blank) {
      self->state = c == '"' ? STRING : digit && self->kind < COUNTS ? NUMBER : OUT;
      self->size = 0, self->number = c - '0';
      if (opens && self->kind == ECHO) self->echo = self->depth;
      self->failed |= c == '{' && self->kind == FAILURE && !self->events;
    } else if (self->state == NUMBER) {
      if (!digit) self->counts[self->kind] = self->number, self->state = OUT;
      else if (self->number < 100000000000000) self->number = self->number * 10 + c - '0';
    } else if (self->state == STRING) {
      if (c == '"' || c == '\n') {
        if (self->kind == ID && strncmp(self->id, "resp_", 5)) self->id[0] = 0;
        else if (self->kind == ID) tell(self, envoy);
        if (self->kind == TYPE && self->size && strcmp(self->reason, "function_call")) self->reason[0] = 0;
        self->state = OUT;
        continue;
      }
      if (c == '\\') self->state = STRING_ESCAPE;
      in_string(self, envoy, c);
    } else if (self->state == KEY_ESCAPE || self->state == STRING_ESCAPE) {
      self->state = self->state == KEY_ESCAPE ? KEY : STRING;
    }
  }
}

const char* envoy_dynamic_module_on_program_init(void) { return "v0.2.0"; }
void* ON(config_new)(void* envoy, Text name, Text pipe) {
  (void)envoy, (void)name;
  int* config = calloc(1, sizeof(int));
  for (size_t i = 0; config && i < pipe.length; i++) *config = *config * 10 + pipe.ptr[i] - '0';
  return config;
}
void ON(config_destroy)(void* config) { free(config); }
void* ON(new)(const int* config, void* envoy) {
  (void)envoy;
  Watch* self = calloc(1, sizeof(Watch));
  if (self) self->pipe = *config, memset(self->counts, -1, sizeof self->counts);
  return self;
}
void ON(destroy)(Watch* self) { free(self); }

int ON(request_headers)(void* envoy, Watch* self, bool ends) {
  Text fragment, length;
  self->inserts = !ends && left_by_picker(envoy, TEXT("x-kv-fragment"), &fragment);
  if (self->inserts && CALL(get_header)(envoy, REQUEST_HEADER, TEXT("content-length"), &length, 0, 0)) {
    char grown[24];
    size_t size = 0;
    for (size_t i = 0; i < length.length; i++) size = size * 10 + length.ptr[i] - '0';
    int digits = snprintf(grown, sizeof grown, "%zu", size + fragment.length);
    CALL(set_header)(envoy, REQUEST_HEADER, TEXT("content-length"), (Text){grown, digits});
  }
  return CONTINUE;
}
int ON(request_body)(void* envoy, Watch* self, bool ends) {
  (void)ends;
  Text fragment;
  size_t count = CALL(get_body_chunks_size)(envoy, REQUEST_BODY), size = 0, done = 0;
  if (!self->inserts || !count || !left_by_picker(envoy, TEXT("x-kv-fragment"), &fragment)) return CONTINUE;
  Text* pieces = malloc(count * sizeof(Text));
  if (!pieces) abort();  // never forward a body without its fragment, which may name the tenant
  CALL(get_body_chunks)(envoy, REQUEST_BODY, pieces);
  for (size_t i = 0; i < count; i++) size += pieces[i].length;
  char *body = malloc(size + 1), *brace;
  if (!body) abort();
  for (size_t i = 0; i < count; done += pieces[i++].length) memcpy(body + done, pieces[i].ptr, pieces[i].length);
  if ((brace = memchr(body, '{', size))) {
    self->inserts = false;
    done = brace + 1 - body;
    CALL(drain_body)(envoy, REQUEST_BODY, size);
    CALL(append_body)(envoy, REQUEST_BODY, (Text){body, done});
    CALL(append_body)(envoy, REQUEST_BODY, fragment);
    CALL(append_body)(envoy, REQUEST_BODY, (Text){body + done, size - done});
  }
  free(body);
  free(pieces);
  return CONTINUE;
}

int ON(response_headers)(void* envoy, Watch* self, bool ends) {
  Text kind = {0};
  self->ended = ends;
  CALL(get_header)(envoy, RESPONSE_HEADER, TEXT("content-type"), &kind, 0, 0);
  self->stream = kind.length >= 17 && !memcmp(kind.ptr, "text/event-stream", 17);
  self->watches = self->stream || (kind.length >= 16 && !memcmp(kind.ptr, "application/json", 16));
  return CONTINUE;
}
int ON(response_body)(void* envoy, Watch* self, bool ends) {
  size_t count = CALL(get_body_chunks_size)(envoy, RESPONSE_BODY);
  Text* pieces = count ? malloc(count * sizeof(Text)) : NULL;
  self->ended = ends;
  if (count && !self->stream) content(self, envoy);
  if (pieces && self->watches && CALL(get_body_chunks)(envoy, RESPONSE_BODY, pieces))
    for (size_t i = 0; i < count; i++) scan(self, envoy, pieces[i].ptr, pieces[i].length);
  free(pieces);
  return CONTINUE;
}
int ON(response_trailers)(void* envoy, Watch* self) { return (void)envoy, self->ended = true, CONTINUE; }
void ON(stream_complete)(void* envoy, Watch* self) {  // before the access log
  char marks[600];
  const long* n = self->counts;
  int length = snprintf(marks, sizeof marks, "%.4f,%.4f,%ld,%d,%d,%ld,%ld,%ld,%ld,%ld,%s,%s", self->first_s, self->last_s,
                        self->events, self->ended, self->failed, n[0], n[1], n[2], n[3], n[4], self->reason, self->id);
  CALL(set_dynamic_metadata_string)(envoy, TEXT("kv"), TEXT("marks"), (Text){marks, length});
}

// Envoy requires these symbols, but calls only the last two.
#define NOTHING(name) void ON(name)(void) {}
#define PARTS(name) NOTHING(name##_headers) NOTHING(name##_data) NOTHING(name##_trailers) NOTHING(name##_complete)
PARTS(http_stream) NOTHING(http_stream_reset) NOTHING(http_callout_done) NOTHING(scheduled)
NOTHING(downstream_above_write_buffer_high_watermark) NOTHING(downstream_below_write_buffer_low_watermark)
int ON(request_trailers)(void* envoy, Watch* self) { return (void)envoy, (void)self, CONTINUE; }
