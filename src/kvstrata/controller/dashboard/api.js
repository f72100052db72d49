// The controller's HTTP API. If it wants a login, the page asks the user for one and then tries again.

import { newSession, pageKey } from "./login.js";

/** An answer that is not a success; `status` 0: no answer. */
export class ApiError extends Error {
  constructor(status, message, code = "", field = "") {
    super(message);
    Object.assign(this, { status, code, field });
  }
}

/** A response with a success status; if a login is needed, asks for it and tries again. Raises ApiError. */
export async function open(method, path, { body, signal, timeoutMs } = {}) {
  for (;;) {
    const key = pageKey();
    const headers = { Accept: "application/json" };
    if (key) headers["kvstrata-page-key"] = key;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method, headers, signal: timeoutMs ? AbortSignal.timeout(timeoutMs) : signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, "The controller does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      await newSession(key);
      continue;
    }
    const told = await response.json().catch(() => ({}));
    throw new ApiError(response.status, told.message || `The controller answered ${response.status}.`, told.code, told.field);
  }
}

export async function get(path, options) {
  return (await open("GET", path, options)).json();
}

export async function send(method, path, body) {
  const response = await open(method, path, { body });
  return response.status === 204 ? {} : response.json();
}

export const instancePath = (id) => `/v1/instances/${encodeURIComponent(id)}`;

const COMMAND_POLL_MS = 500;
const COMMAND_WAIT_MS = 60_000;

/** Waits until a command has ended, and returns it. Raises ApiError after COMMAND_WAIT_MS. */
async function ended(number) {
  const until = Date.now() + COMMAND_WAIT_MS;
  for (;;) {
    const command = await get(`/v1/commands/${number}`);
    if (command.state === "done" || command.state === "failed") return command;
    if (Date.now() > until) throw new ApiError(0, `Command ${number} has no answer yet; its end will be in the events.`);
    await new Promise((resolve) => setTimeout(resolve, COMMAND_POLL_MS));
  }
}

/** The commands of an answer, once all have ended. */
export function outcomes(answer) {
  return answer.done ? Promise.resolve(answer.commands) : Promise.all(answer.commands.map(({ number }) => ended(number)));
}

/** A document that an instance answers. Raises ApiError if it refuses or does not answer. */
export async function documentOf(path) {
  const answer = await get(path);
  if (answer.done) {
    if (!answer.ok) throw new ApiError(422, answer.message || "The instance refused.");
    return answer.document;
  }
  const { state, message, result } = await ended(answer.command);
  if (state === "failed") throw new ApiError(422, message || "The instance refused.");
  return result;
}
