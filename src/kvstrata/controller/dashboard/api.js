// The HTTP API of the controller. If it wants a login, the page asks the user for one and then tries again.

import { newToken, token } from "./login.js";

/** An answer that is not a success; `status` 0: no answer. */
export class ApiError extends Error {
  constructor(status, message, code = "", field = "") {
    super(message);
    Object.assign(this, { status, code, field });
  }
}

/** A response with a success status; if a login is needed, asks for it and tries again. Raises ApiError. */
async function open(method, path, { body, timeoutMs } = {}) {
  for (;;) {
    const bearer = token();
    const headers = { Accept: "application/json" };
    if (bearer) headers.Authorization = `Bearer ${bearer}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method, headers, signal: timeoutMs ? AbortSignal.timeout(timeoutMs) : null, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch {
      throw new ApiError(0, "The controller does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      await newToken(bearer);
      continue;
    }
    const { message, code, field } = await response.json().catch(() => ({}));
    throw new ApiError(response.status, message || `The controller answered ${response.status}.`, code, field);
  }
}

export async function get(path, options) {
  return (await open("GET", path, options)).json();
}

export async function send(method, path, body) {
  const response = await open(method, path, { body });
  return response.status === 204 ? {} : response.json();
}
