-- The watcher for an Envoy that cannot load the dynamic module: it does the same as ext/envoy/watch.c, without a pipe.
-- It writes the marks into the metadata at each token and at the end; the access log reports them while an answer runs.
local AUTHZ, MAX_CARRY = "envoy.filters.http.ext_authz", 65536
local CONTENT = {"content", "text", "delta", "reasoning_content", "reasoning", "thinking", "arguments", "partial_json"}
local ECHO = {"tools", "metadata", "schema", "schema_", "input", "input_messages"}
local COUNTS = {
  {"prompt_tokens", "input_tokens"}, {"cached_tokens"}, {"completion_tokens", "output_tokens"},
  {"cache_read_input_tokens"}, {"cache_creation_input_tokens"},
}
local REASONS = {'"finish_reason"%s*:%s*"([^"]+)"', '"type"%s*:%s*"(function_call)"', '"stop_reason"%s*:%s*"([^"]+)"'}
local HAS, NO_WORD = {}, "[^!-+--~]"
for i, key in ipairs(CONTENT) do HAS[i] = '[^\\]"' .. key .. '"%s*:%s*"[^"]' end

function envoy_on_request(handle)
  local left = handle:streamInfo():dynamicMetadata():get(AUTHZ)
  local fragment = left and left["x-kv-fragment"]
  if not fragment or fragment == "" then return end
  local length = tonumber(handle:headers():get("content-length") or "")
  if length then handle:headers():replace("content-length", string.format("%d", length + #fragment)) end
  for chunk in handle:bodyChunks() do
    if fragment and chunk:length() > 0 then
      local body = chunk:getBytes(0, chunk:length())
      local brace = body:find("{", 1, true)
      if brace then
        chunk:setBytes(body:sub(1, brace) .. fragment .. body:sub(brace + 1))
        fragment = nil
      end
    end
  end
end

function envoy_on_response(handle)
  local kind = handle:headers():get("content-type") or ""
  local stream = kind:sub(1, 17) == "text/event-stream"
  local watches = stream or kind:sub(1, 16) == "application/json"
  local first, last, events, failed, reason, id, carry = 0, 0, 0, 0, "", "", " "
  local counts = {-1, -1, -1, -1, -1}
  -- Do not keep Envoy's wrapper objects for the next chunk: Envoy refuses their use then.
  local function mark(ended)
    local words = {}
    for i = 1, 5 do words[i] = string.format("%.0f", counts[i]) end
    handle:streamInfo():dynamicMetadata():set("kv", "marks", string.format(
      "%.4f,%.4f,%d,%d,%d,%s,%s,%s", first, last, events, ended, failed, table.concat(words, ","), reason, id))
  end
  local function content(count)
    last = handle:timestampString(EnvoyTimestampResolution.MICROSECOND) / 1e6
    events = events + count
    if first == 0 then first = last end
    mark(0)
  end
  local function scan(line)
    for _, key in ipairs(ECHO) do
      if line:find('"' .. key .. '"', 1, true) then
        line = line:gsub("\\.", "  "):gsub('"[^"]*"', function(text) return (text:gsub("[][{}]", " ")) end)
        for _, brackets in ipairs({"%b{}", "%b[]"}) do line = line:gsub('("' .. key .. '"%s*:%s*)' .. brackets, "%1") end
      end
    end
    if stream then
      local count = 0
      for _, pattern in ipairs(HAS) do
        local at = 1
        while true do
          local _, to = line:find(pattern, at)
          if not to then break end
          count, at = count + 1, to
        end
      end
      if count > 0 then content(count) end
    end
    for i, keys in ipairs(COUNTS) do
      for _, key in ipairs(keys) do
        for value in line:gmatch('[^\\]"' .. key .. '"%s*:%s*(%d+)%D') do counts[i] = tonumber(value) end
      end
    end
    for _, pattern in ipairs(REASONS) do
      if reason == "" then reason = (line:match("[^\\]" .. pattern) or ""):sub(1, 140):gsub(NO_WORD, "_") end
    end
    if events == 0 and line:find('[^\\]"error"%s*:%s*{') then failed = 1 end
    if id == "" then id = (line:match('[^\\]"id"%s*:%s*"(resp_[^"]*)"') or ""):sub(1, 140):gsub(NO_WORD, "_") end
  end
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    if length > 0 then
      if not stream then content(0) end
      if watches then
        carry = carry .. chunk:getBytes(0, length)
        -- Scan whole lines only; the end of an overlong line is scanned again together with the next chunk.
        local to = #carry
        while to > 0 and carry:byte(to) ~= 10 do to = to - 1 end
        if to == 0 and #carry > MAX_CARRY then
          scan(carry)
          carry = " " .. carry:sub(-256)
        elseif to > 0 then
          scan(carry:sub(1, to))
          carry = " " .. carry:sub(to + 1)
        end
      end
    end
  end
  if watches then scan(carry .. "\n") end
  mark(1)
end
